"""Training checkpoints: parameters, optimizer state and loop state, restored bit for bit.

Beside Orbax's own files, each step holds a manifest of names, dtypes and shapes, so that a mismatch is
reported by name before anything is read (Orbax would convert a dtype silently), and the directory holds
``training.json`` with the format's version and the run's configuration.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from hybridjax.checkpoints.directory import listing
from hybridjax.errors import CheckpointError
from hybridjax.json_files import read_object, write_object

FORMAT_VERSION = 1
_RUN_FILE = "training.json"
_EXTRA, _MANIFEST = "extra", "manifest"


class TrainingCheckpoints:
    """The checkpoints of one training run. Use as a context manager, or call ``close``.

    Args:
      directory: created if missing.
      keep: how many of the newest steps are kept.
      config: JSON-able settings of the run, stored beside the checkpoints. Opening the directory with
        other settings is an error; None skips the comparison.

    Raises:
      CheckpointError: the directory belongs to another format version or configuration.
    """

    def __init__(self, directory: str | Path, keep: int = 3, *, config: Mapping[str, Any] | None = None):
        self.directory = Path(directory).expanduser().resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._check_run(config)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> "TrainingCheckpoints":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        self._manager.close()

    @property
    def config(self) -> dict[str, Any] | None:
        """The run's settings as stored, None if none were given."""
        return read_object(self.directory / _RUN_FILE).get("config")

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a step completely before it returns; a crash leaves no partial step.

        Args:
          step: the step's number, above all saved ones.
          state: named pytrees of arrays (e.g. "params", "opt_state"), and optionally "extra", a
            JSON-able dict (data position, random seeds).

        Raises:
          CheckpointError: the step is not above the newest one, a leaf is no array, or extra is not
            JSON-able.
        """
        newest = self.latest_step()
        if newest is not None and step <= newest:
            raise CheckpointError(f"{self.directory}: step {step} is not above the newest, {newest}")
        groups = {name: _named_leaves(name, tree) for name, tree in state.items() if name != _EXTRA}
        extra = dict(state.get(_EXTRA, {}))
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra cannot be stored as JSON: {error}") from error
        manifest = {name: {key: _described(x) for key, x in group.items()} for name, group in groups.items()}
        items: dict[str, Any] = {
            _EXTRA: ocp.args.JsonSave(extra),
            _MANIFEST: ocp.args.JsonSave(manifest),
        }
        for name, group in groups.items():
            if group:
                items[name] = ocp.args.StandardSave(group)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def latest_step(self) -> int | None:
        """The newest complete step, None if there is none."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """Complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Reads a step.

        Args:
          step: one of ``all_steps()``.
          like: trees as they were saved, by name, with arrays or jax.ShapeDtypeStructs as leaves;
            results are placed as those leaves are (their ``sharding``). Names may be left out, so that
            parameters can be read without the optimizer's state; "extra" is always returned.

        Raises:
          CheckpointError: there is no such step, it is damaged, or names, dtypes or shapes differ.
        """
        if step not in self.all_steps():
            known = ", ".join(map(str, self.all_steps())) or "none"
            raise CheckpointError(f"{self.directory}: no step {step}; complete steps: {known}")
        groups = {name: _named_leaves(name, tree) for name, tree in like.items() if name != _EXTRA}
        texts = {name: ocp.args.JsonRestore() for name in (_EXTRA, _MANIFEST)}
        stored = self._read(step, texts)
        _check_manifest(self.directory / str(step), stored[_MANIFEST], groups)
        items = {
            name: ocp.args.StandardRestore({key: _abstract(x) for key, x in group.items()})
            for name, group in groups.items()
            if group
        }
        arrays = self._read(step, items) if items else {}
        out: dict[str, Any] = {_EXTRA: stored[_EXTRA]}
        for name, group in groups.items():
            leaves = [arrays[name][key] for key in group]
            out[name] = jax.tree.unflatten(jax.tree.structure(like[name]), leaves)
        return out

    def _read(self, step: int, items: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax, tensorstore and json each have their own
            message = f"{self.directory / str(step)} is damaged: {type(error).__name__}: {error}"
            raise CheckpointError(message[:1000]) from error

    def _check_run(self, config: Mapping[str, Any] | None) -> None:
        file = self.directory / _RUN_FILE
        if not file.exists():
            draft = file.with_suffix(".tmp")
            write_object(draft, {"format_version": FORMAT_VERSION, "config": config and dict(config)})
            os.replace(draft, file)
            return
        stored = read_object(file)
        version = stored.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{file}: format_version is {version!r}; allowed: {FORMAT_VERSION}")
        if config is None:
            return
        ours, theirs = json.loads(json.dumps(dict(config))), stored.get("config") or {}
        names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        problems = [f"{n} is {theirs.get(n)!r} there, {ours.get(n)!r} now" for n in names]
        if problems:
            raise CheckpointError(f"{file}: the run was started with other settings: {listing(problems)}")


def _named_leaves(name: str, tree: Any) -> dict[str, Any]:
    """Leaves by path. Orbax gets this flat dict, so any pytree node type can be stored."""
    out: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        key = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
            raise CheckpointError(f"{name}.{key} is a {type(leaf).__name__}; leaves must be arrays")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise CheckpointError(f"{name}.{key} is a typed PRNG key; store jax.random.key_data of it")
        if key in out:
            raise CheckpointError(f"two leaves of {name} are called {key}")
        out[key] = leaf
    return out


def _described(leaf: Any) -> list[Any]:
    return [np.dtype(leaf.dtype).name, list(leaf.shape)]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct | np.ndarray:
    if isinstance(leaf, np.ndarray | np.generic):
        return np.empty(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _check_manifest(step: Path, stored: Mapping[str, Any], wanted: Mapping[str, dict[str, Any]]) -> None:
    problems: list[str] = []
    for group in sorted(wanted):
        if group not in stored:
            problems.append(f"{group} is not in the checkpoint, which has {', '.join(sorted(stored))}")
            continue
        ours = {key: _described(leaf) for key, leaf in wanted[group].items()}
        for key in sorted(stored[group].keys() | ours.keys()):
            there, here = stored[group].get(key), ours.get(key)
            if there != here:
                problems.append(f"{group}.{key} is {_text(there)} in the checkpoint, {_text(here)} here")
    if problems:
        raise CheckpointError(f"{step}: does not fit this model: {listing(problems)}")


def _text(described: list[Any] | None) -> str:
    return "absent" if described is None else f"{described[0]}{described[1]}"
