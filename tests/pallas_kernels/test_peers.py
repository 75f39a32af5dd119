"""What benchmarks.kernels asks of the peers, with stand-ins that follow fla-core 0.6.0's documentation."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernels, peers
from benchmarks.recurrent_cases import CASES
from hybridjax.pallas_kernels import tuning


def _recurrence(q, k, v, g, beta, scale, state, corrected):
    """[B, T, H, K] token by token, states [B, HV, K, V] in float64."""
    share = v.shape[2] // q.shape[2]
    q, k = (np.repeat(np.asarray(x, np.float64), share, axis=2) for x in (q, k))
    v, state, out = np.asarray(v, np.float64), np.asarray(state, np.float64), []
    for t in range(q.shape[1]):
        state = np.exp(np.asarray(g[:, t], np.float64))[..., None, None] * state
        known = np.einsum("bhk,bhkv->bhv", k[:, t], state) if corrected else 0.0
        delta = np.asarray(beta[:, t], np.float64)[..., None] * (v[:, t] - known)
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], delta)
        out.append(scale * np.einsum("bhk,bhkv->bhv", q[:, t], state))
    return np.stack(out, axis=1), state


def simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False):
    assert g is None and output_final_state and initial_state.shape == (q.shape[0], 32, 128, 128)
    decays = jnp.broadcast_to(g_gamma, v.shape[:3])
    return _recurrence(q, k, v, decays, jnp.ones(v.shape[:3]), scale, initial_state, corrected=False)


def gated_delta(
    q,
    k,
    v,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
):
    assert use_qk_l2norm_in_kernel and output_final_state and g.shape == beta.shape == v.shape[:3]
    assert initial_state.shape == (q.shape[0], 48, 128, 128)
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    return _recurrence(q, k, v, g, beta, scale, initial_state, corrected=True)


def library(time=lambda step, calls: 10.0, **functions):
    given = {
        "simple_gla_decode": simple_gla,
        "simple_gla_prefill": simple_gla,
        "gated_delta_decode": gated_delta,
        "gated_delta_prefill": gated_delta,
        **functions,
    }
    return peers.Library("fla 9", given, lambda x: x, lambda x: np.asarray(x, np.float64), time)


@pytest.mark.parametrize("op", peers.RECORDED)
def test_a_peer_gets_the_operands_of_ours_and_its_results_are_laid_out_alike(op):
    case = CASES[op](128 if op.endswith("prefill") else 3, key=5)
    assert peers.error(op, case, library()) < 1e-6


@pytest.mark.parametrize("op", ["simple_gla_decode", "gated_delta_prefill"])
def test_a_wrong_peer_is_not_timed(op, capsys):
    def transposed(**given):
        out, state = library().functions[op](**given)
        return out, state.swapaxes(-1, -2)

    case = CASES[op](64 if op.endswith("prefill") else 2, key=5)
    assert peers.error(op, case, library(**{op: transposed})) > 0.5
    found = peers.measure(op, case, iter([(8, case, 8, 1)]), library(**{op: transposed}))
    assert {peer.where for listed in found.values() for peer in listed} == {"recorded"}
    assert "fla 9: largest relative error" in capsys.readouterr().out


def test_states_go_from_call_to_call_and_copies_of_the_inputs_take_turns():
    seen = []

    def recorded(**given):
        seen.append(given)
        return None, given["initial_state"] + 1

    def time(step, calls):
        state = None
        for i in range(calls):
            state = step(state, i)
        return float(state[0, 0, 0, 0] - seen[0]["initial_state"][0, 0, 0, 0])

    case = CASES["simple_gla_decode"](1)
    assert (
        peers.microseconds("simple_gla_decode", case, library(time, simple_gla_decode=recorded), 5, 2) == 5.0
    )
    buffers = [given["q"].unsafe_buffer_pointer() for given in seen]
    assert buffers[0] == buffers[2] == buffers[4] != buffers[1] == buffers[3]


def test_measured_peers_replace_the_recorded_ones_of_their_name():
    case = CASES["gated_delta_prefill"](64)
    cases = [(2048, case, 8, 1), (64, case, 8, 1)]
    found = peers.measure("gated_delta_prefill", case, iter(cases), library())
    assert found[2048] == [
        peers.Peer("fla 9", 10.0, "this run"),
        peers.Peer("FlashInfer 0.7.2", 97.6, "recorded"),
    ]
    assert found[64] == [peers.Peer("fla 9", 10.0, "this run")]
    assert found[8192][0] == peers.Peer("fla 0.6.0", 688.0, "recorded")
    said = peers.beside(5.0, found[2048])
    assert said == "0.50 x 10.0 us of fla 9 (this run), 0.05 x 97.6 us of FlashInfer 0.7.2 (recorded)"


def test_a_peer_is_tuned_for_a_timed_size_and_not_for_the_check():
    lengths = []

    def tuned(**given):
        lengths.append(given["q"].shape[1])
        return simple_gla(**given)

    check, case = (CASES["simple_gla_prefill"](tokens) for tokens in (64, 128))
    peers.measure("simple_gla_prefill", check, [(128, case, 8, 1)], library(simple_gla_prefill=tuned))
    assert lengths == [128, 64]


def test_a_failing_peer_leaves_the_recorded_figures(capsys):
    def broken(**given):
        raise RuntimeError("no kernel image")

    case = CASES["simple_gla_decode"](1)
    found = peers.measure("simple_gla_decode", case, [(1, case, 8, 1)], library(simple_gla_decode=broken))
    assert found[8] == [peers.Peer("fla 0.6.0", 13.0, "recorded")]
    assert "no kernel image" in capsys.readouterr().out


def modules(gpu=True, broken=None):
    """An importer of stand-ins; ``broken`` is what importing fla raises."""

    def find(name):
        if name == "torch":
            return types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: gpu))
        if name.startswith("triton"):
            raise ModuleNotFoundError("No module named 'triton'")
        if broken:
            raise broken
        return types.SimpleNamespace(
            __version__="0.6.0",
            fused_recurrent_simple_gla=1,
            chunk_simple_gla=2,
            fused_recurrent_gated_delta_rule=3,
            chunk_gated_delta_rule=4,
        )

    return find


def test_peers_are_loaded_only_where_they_can_run():
    loaded, reason = peers.load(modules())
    assert loaded is not None and not reason
    assert loaded.name == "fla 0.6.0"
    assert loaded.functions == dict(zip(peers.RECORDED, (1, 3, 2, 4)))
    assert peers.load(modules(gpu=False)) == (None, "torch sees no GPU")
    missing = ModuleNotFoundError("No module named 'fla'")
    assert peers.load(modules(broken=missing)) == (None, "No module named 'fla'")
    loaded, reason = peers.load(modules(broken=RuntimeError("another driver")))
    assert loaded is None and "RuntimeError: another driver" in reason


def test_variants_of_an_autotuner_are_compiled_before_it_times_them():
    compiled, active = [], []

    class Mode:
        def __init__(self, pool, ignore_errors):
            assert ignore_errors

        def __enter__(self):
            active.append(True)

        def __exit__(self, *error):
            active.pop()

    class Tuner:
        nargs = {"x": 1}
        fn = types.SimpleNamespace(warmup=lambda **given: compiled.append((given, list(active))))

        def prune_configs(self, kwargs):
            return [types.SimpleNamespace(all_kwargs=lambda n=n: {"num_warps": n}) for n in (2, 4)]

    peers._compile_together(Tuner, Mode)
    assert len(Tuner().prune_configs({"grid": (1,), "warmup": False})) == 2
    assert compiled == [({"x": 1, "grid": (1,), "num_warps": n}, [True]) for n in (2, 4)]
    Tuner.fn = types.SimpleNamespace()  # another version of Triton: compiled one by one, then
    assert len(Tuner().prune_configs({"grid": (1,)})) == 2 and not active


def arguments(*given):
    return [
        "kernels",
        "--ops",
        "simple_gla_decode",
        "--sizes",
        "1,2",
        "--repeats",
        "1",
        "--no-profile",
        *given,
    ]


@pytest.fixture
def quick(monkeypatch):
    """Times of stand-ins instead of real ones."""
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda elements: 1e12)
    monkeypatch.setattr(kernels, "error", lambda *given: 0.0)
    monkeypatch.setattr(kernels, "architecture", lambda: "sm_90")

    def microseconds(function, case, repeats, profile, xla):
        columns = getattr(function.keywords.get("tuning"), "columns", 128)
        return (10.0 if (columns == 64) == (case.operands[5].shape[0] == 2) else 20.0), float("nan")

    monkeypatch.setattr(kernels, "microseconds", microseconds)


def test_recorded_figures_are_named_as_such_where_no_peer_runs(quick, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", arguments())
    monkeypatch.setattr(peers, "load", lambda: (None, "No module named 'torch'"))
    assert kernels.main() == 0
    said = capsys.readouterr().out
    assert "peers: as recorded; No module named 'torch'" in said
    assert "1.54 x 6.5 us of fla 0.6.0 (recorded)" in said


def test_tuning_ends_with_a_table_of_the_best_variants(quick, monkeypatch, capsys, tmp_path):
    file = tmp_path / "table.json"
    monkeypatch.setattr("sys.argv", arguments("--no-peers", "--tune", "--write-table", str(file)))
    assert kernels.main() == 0
    table = tuning.read(file)
    assert [entry.get("states_at_most") for entry in table["ops"]["simple_gla_decode"]] == [32, None]
    assert [entry["options"]["columns"] for entry in table["ops"]["simple_gla_decode"]] == [32, 64]
    assert tuning.text(table) in capsys.readouterr().out

    other = {**table, "architecture": "sm_100"}
    tuning.write(file, other)
    with pytest.raises(tuning.ConfigError, match=r"table.json is of {'architecture': 'sm_100'"):
        kernels.main()
