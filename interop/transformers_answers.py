"""What transformers computes for a checkpoint: run by a Python that has torch and transformers.

    python transformers_answers.py REQUEST.json ANSWERS.safetensors

interop/compare.py starts it and describes both files (docs/interoperability.md). It imports nothing of
hybridjax, runs no code from the checkpoint, reads safetensors weights only and makes no downloads.

Exit status 0: the answers are written; their metadata has "refusal" if transformers cannot take the
checkpoint at all. Anything else ends in a traceback.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

import safetensors.torch
import torch
import transformers
from transformers.image_utils import load_image
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LOCAL = {"local_files_only": True, "trust_remote_code": False}


class Refusal(Exception):
    """transformers cannot take this checkpoint; nothing is wrong with either side."""


def model_class(directory):
    """The class that config.json names, from transformers alone."""
    config = json.loads((directory / "config.json").read_text())
    name, kind = (config.get("architectures") or [None])[0], config.get("model_type")
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    known = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not known or found is transformers.PreTrainedModel or kind not in CONFIG_MAPPING:
        raise Refusal(
            f"transformers {transformers.__version__} does not know architecture {name!r} "
            f"(model_type {kind!r}) without code from the checkpoint, which is never run"
        )
    return found


def load(directory, dtype):
    found = model_class(directory)
    model, info = found.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        use_safetensors=True,
        output_loading_info=True,
        **LOCAL,
    )
    missing = sorted(info["missing_keys"]) + sorted(map(str, info.get("mismatched_keys", ())))
    if missing:
        raise SystemExit(
            f"{directory}: transformers found no values for {len(missing)} tensors: {missing[:5]}"
        )
    return model.eval(), sorted(info["unexpected_keys"])


class Selections:
    """Records which tokens each query of each indexer may attend to, while models run."""

    def __init__(self, model):
        self.seen = {}
        for module in model.modules():
            if type(module).__name__.endswith("QSAIndexer"):
                self.seen[module.layer_idx] = []
                module.register_forward_hook(self._hook)

    def _hook(self, module, _, selected):
        self.seen[module.layer_idx].append(selected[0, 0])

    def take(self):
        """Per layer, bool[rows, keys] of each call since the last take."""
        out = {layer: list(calls) for layer, calls in self.seen.items()}
        for calls in self.seen.values():
            calls.clear()
        return out


def packed(forward, generated):
    """uint8[T, ceil(T / 8)]: the rows of the prompt and those of cached decoding, little bit first."""
    rows = [*forward, *(row for call in generated[1:] for row in call)]
    total = len(rows)
    out = torch.zeros((total, -(-total // 8) * 8), dtype=torch.uint8)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return (out.view(total, -1, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)


def image_inputs(directory, model, spec):
    """What transformers' own processor makes of the image file."""
    if (directory / "preprocessor_config.json").exists():
        processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil", **LOCAL)
    else:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil(**spec["processor"])
    made = processor(images=[load_image(spec["file"])], return_tensors="pt")
    made = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
    return made, model.get_image_features(**made)


def expanded(ids, grid, config):
    """The prompt with its placeholder repeated once per feature."""
    count = int(grid[0].prod()) // config.vision_config.spatial_merge_size**2
    return [t for i in ids for t in [i] * (count if i == config.image_token_id else 1)]


def answer(model, selections, ids, new_tokens, inputs):
    """Teacher-forced logits and greedy decoding of one prompt."""
    ids = torch.tensor([ids])
    # Without an explicit mask, generate() takes prompt tokens that equal pad_token_id for padding.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}
    selections.take()
    logits = model(**inputs).logits[0]
    forward = selections.take()
    greedy = model.generate(**inputs, generation_config=model.generation_config)
    generated = selections.take()
    tokens = greedy.sequences[0, ids.shape[1] :]
    if len(tokens) != new_tokens:
        raise SystemExit(f"generate() gave {len(tokens)} tokens instead of {new_tokens}")
    out = {
        "ids": ids[0],
        "logits": logits.float(),
        "tokens": tokens,
        "steps": torch.cat(greedy.logits).float(),
    }
    for layer, calls in forward.items():
        out[f"selected.{layer}"] = packed(calls[0], generated[layer])
    return out


def run(request):
    directory = Path(request["model"])
    facts = {"transformers": transformers.__version__, "torch": torch.__version__}
    tensors = {}
    try:
        model, unread = load(directory, request["dtype"])
    except Refusal as refusal:
        return tensors, {**facts, "refusal": str(refusal)}
    facts.update({"class": type(model).__name__, "unread_tensors": json.dumps(unread)})
    # Settings of the checkpoint (sampling, end tokens) would otherwise fill what a call leaves out.
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=request["new_tokens"],
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    selections = Selections(model)
    made = {}
    if request["image"]:
        made, features = image_inputs(directory, model, request["image"])
        tensors.update({f"image.{name}": value for name, value in made.items()})
        tensors["image.features"] = torch.cat(tuple(features.pooler_output)).float()
    tokenizer = None
    if any(prompt["text"] is not None for prompt in request["prompts"]):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **LOCAL)
    for number, prompt in enumerate(request["prompts"]):
        ids, inputs = prompt["ids"], {}
        if prompt["image"]:
            ids = expanded(ids, made["image_grid_thw"], model.config)
            kinds = (torch.tensor([ids]) == model.config.image_token_id).int()
            inputs = {**made, "mm_token_type_ids": kinds}
            grid = made["image_grid_thw"]
            rope, _ = model.model.get_rope_index(torch.tensor([ids]), kinds, image_grid_thw=grid)
            tensors[f"{number}.rope"] = rope[:, 0].T
        if prompt["text"] is not None:
            tensors[f"{number}.encoded"] = torch.tensor(tokenizer(prompt["text"])["input_ids"])
        got = answer(model, selections, ids, request["new_tokens"], inputs)
        tensors.update({f"{number}.{name}": value for name, value in got.items()})
        print(f"prompt {number + 1} of {len(request['prompts'])}: {len(ids)} tokens", file=sys.stderr)
    return tensors, facts


def main():
    source, target = sys.argv[1:]
    with torch.no_grad():
        tensors, facts = run(json.loads(Path(source).read_text()))
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    safetensors.torch.save_file(tensors, target, metadata=facts)


if __name__ == "__main__":
    main()
