import json

import numpy as np
import pytest

from hybridjax.benchmarking.conversations import read_rows
from hybridjax.benchmarking.datasets import DatasetConfig, as_text, load_dataset
from hybridjax.benchmarking.statistics import arrival_times
from hybridjax.errors import ConfigError

GOOD = {"conversations": [{"from": "human", "value": "How are you?"}, {"from": "gpt", "value": "I am fine."}]}
MALFORMED = [
    None,
    17,
    {},
    {"conversations": []},
    {"conversations": "text"},
    {"conversations": [{"value": "alone"}]},
    {"conversations": [{"value": 3}, {"value": "answer"}]},
    {"conversations": ["one", "two"]},
    {"conversations": [{"value": ""}, {"value": "answer"}]},
    {"prompt": ""},
    {"prompt": [1, -2]},
    {"prompt": [1, True]},
    {"prompt": "x", "output_len": 0},
    {"prompt": "x", "output_len": "many"},
    {"prompt": "x", "completion": 5},
]


@pytest.mark.parametrize("name", ["random", "random-ids", "generated-shared-prefix"])
def test_the_same_flags_give_the_same_workload(tokenizer, name):
    def make(seed):
        config = DatasetConfig(
            dataset_name=name,
            num_prompts=6,
            random_input_len=20,
            random_output_len=9,
            gsp_num_groups=2,
            gsp_prompts_per_group=3,
            gsp_system_prompt_len=8,
            gsp_question_len=4,
            seed=seed,
        )
        return load_dataset(config, tokenizer)

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert len(make(1).items) == 6


def test_random_lengths_follow_the_range_ratio():
    def lengths(ratio):
        config = DatasetConfig(
            dataset_name="random-ids",
            num_prompts=300,
            random_input_len=20,
            random_output_len=10,
            random_range_ratio=ratio,
            vocab_size=50,
        )
        items = load_dataset(config, None).items
        assert all(len(item.prompt) == item.input_len for item in items)
        assert all(0 <= token < 50 for item in items for token in item.prompt)
        return {item.input_len for item in items}, {item.output_len for item in items}

    assert lengths(1.0) == ({20}, {10})
    assert lengths(0.5) == (set(range(10, 21)), set(range(5, 11)))
    assert lengths(0.0) == (set(range(1, 21)), set(range(1, 11)))


def test_lengths_do_not_follow_arrival_times():
    config = DatasetConfig(dataset_name="random-ids", num_prompts=2000, random_input_len=99, vocab_size=9)
    lengths = [item.input_len for item in load_dataset(config, None).items]
    gaps = np.diff(arrival_times(2001, 5.0, config.seed))
    assert abs(np.corrcoef(lengths, gaps)[0, 1]) < 0.1


def test_random_ids_leave_special_tokens_out(tokenizer):
    config = DatasetConfig(dataset_name="random-ids", num_prompts=20, random_input_len=200)
    items = load_dataset(config, tokenizer).items
    tokens = {token for item in items for token in item.prompt}
    assert len(tokens) > 500 and not tokens & tokenizer.special_ids
    assert max(tokens) < tokenizer.vocab_size


@pytest.mark.parametrize("with_file", [False, True])
def test_random_text_is_as_long_as_asked(tokenizer, tmp_path, with_file):
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps({"prompt": "naïve — text of some length. " * 50}))
    config = DatasetConfig(
        num_prompts=12,
        random_input_len=40,
        random_range_ratio=1.0,
        dataset_path=str(file) if with_file else None,
    )
    for item in load_dataset(config, tokenizer).items:
        assert len(tokenizer.encode(item.prompt)) == item.input_len
        assert 38 <= item.input_len <= 40


def test_shared_prefixes_are_shared_within_groups_only():
    config = DatasetConfig(
        dataset_name="generated-shared-prefix",
        gsp_num_groups=3,
        gsp_prompts_per_group=4,
        gsp_system_prompt_len=30,
        gsp_question_len=5,
        gsp_output_len=7,
        vocab_size=1000,
    )
    items = load_dataset(config, None).items
    assert {(item.input_len, item.output_len) for item in items} == {(35, 7)}
    prefixes = [item.prompt[:30] for item in items]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len({item.prompt for item in items}) == 12
    assert len(set(prefixes[:4])) > 1


@pytest.mark.parametrize("lines", [False, True])
def test_malformed_rows_are_skipped_and_counted(tokenizer, tmp_path, lines):
    file = tmp_path / "sharegpt.json"
    long = {"conversations": [{"value": "word " * 300}, {"value": "answer of some tokens"}]}
    short = {"conversations": [{"value": "question here"}, {"value": ""}]}
    rows = [GOOD, *MALFORMED, long, short, {"conversation": [{"content": "A b c"}, {"content": "d e f"}]}]
    text = json.dumps(rows)
    malformed = len(MALFORMED)
    if lines:
        text = "\n".join(map(json.dumps, rows)) + "\n\n{not json\n"
        malformed += 1
    file.write_text(text)
    config = DatasetConfig(dataset_name="sharegpt", dataset_path=str(file), sharegpt_context_len=60)
    workload = load_dataset(config, tokenizer)
    assert {item.prompt for item in workload.items} == {"How are you?", "A b c"}
    assert workload.skipped == {"malformed": malformed, "too_short": 1, "too_long": 1}
    fine = next(item for item in workload.items if item.prompt == "How are you?")
    assert fine.input_len == len(tokenizer.encode("How are you?"))
    assert fine.output_len == len(tokenizer.encode("I am fine.", add_special_tokens=False))


def test_custom_rows_keep_their_order_and_lengths(tmp_path):
    file = tmp_path / "custom.jsonl"
    rows = [{"prompt": [3, 4, 5], "output_len": 2}, {"prompt": [6]}, {"prompt": [7, 8], "max_tokens": 4}]
    file.write_text("\n".join(map(json.dumps, rows)))
    config = DatasetConfig(dataset_name="custom", dataset_path=str(file), random_output_len=11, num_prompts=2)
    items = load_dataset(config, None).items
    assert [(item.prompt, item.input_len, item.output_len) for item in items] == [
        ((3, 4, 5), 3, 2),
        ((6,), 1, 11),
    ]


def test_lines_end_at_newlines_only(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a\u2028b\x85c"}\n{"prompt": "d"}', encoding="utf-8")
    rows = read_rows(file)
    assert [row.prompt for row in rows.rows] == ["a\u2028b\x85c", "d"] and rows.malformed == 0


def test_token_ids_become_text_for_chat(tokenizer):
    config = DatasetConfig(dataset_name="random-ids", num_prompts=3, random_input_len=8)
    workload = load_dataset(config, tokenizer)
    for before, after in zip(workload.items, as_text(workload, tokenizer).items, strict=True):
        assert after.prompt == tokenizer.decode(before.prompt)
    with pytest.raises(ConfigError, match="tokenizer"):
        as_text(workload, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dataset_name": "sharegpt"}, "dataset-path"),
        ({"dataset_name": "random"}, "tokenizer"),
        ({"dataset_name": "random-ids"}, "vocab-size"),
        ({"dataset_name": "elsewhere"}, "dataset_name"),
        ({"dataset_name": "custom", "dataset_path": "/nonexistent"}, "cannot read"),
    ],
)
def test_what_is_missing_is_named(flags, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(DatasetConfig(**flags), None)


@pytest.mark.parametrize(
    ("text", "message"), [("[1, 2", "not JSON"), ("[]", "no rows"), ('{"a": 1}', "1 malformed")]
)
def test_a_useless_file_is_refused(tmp_path, text, message):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_dataset(DatasetConfig(dataset_name="custom", dataset_path=str(file)), None)


@pytest.mark.parametrize("flags", [{"num_prompts": 0}, {"random_range_ratio": 1.5}, {"gsp_num_groups": -1}])
def test_settings_that_cannot_work_are_refused(flags):
    with pytest.raises(ConfigError, match=next(iter(flags))):
        DatasetConfig(**flags)


def shared(tokenizer, **changes):
    sizes = {"gsp_num_groups": 3, "gsp_prompts_per_group": 4, "gsp_system_prompt_len": 40}
    sizes |= {"gsp_question_len": 10, "gsp_output_len": 8}
    config = DatasetConfig(dataset_name="generated-shared-prefix", **(sizes | changes))
    return load_dataset(config, tokenizer).items


def test_shared_prefixes_can_come_in_order_and_in_lengths(tokenizer):
    ordered = shared(tokenizer, gsp_ordered=True)
    systems = [item.prompt[:40] for item in ordered]
    assert systems == [system for system in dict.fromkeys(systems) for _ in range(4)]
    assert len(set(systems)) == 3
    assert {item.input_len for item in ordered} == {50} and {item.output_len for item in ordered} == {8}
    mixed = shared(tokenizer, gsp_range_ratio=0.5, gsp_prompts_per_group=40)
    assert len({item.input_len for item in mixed}) > 10
    assert all(25 <= item.input_len == len(item.prompt) <= 50 for item in mixed)
    assert {item.output_len for item in mixed} == {4, 5, 6, 7, 8}


def test_prompts_are_dressed_as_the_flags_say(tokenizer):
    def items(**changes):
        config = DatasetConfig(dataset_name="random", num_prompts=5, random_input_len=12, **changes)
        return load_dataset(config, tokenizer).items

    plain = items()
    suffixed = items(prompt_suffix=" So?")
    assert [item.prompt for item in suffixed] == [item.prompt + " So?" for item in plain]
    assert [item.input_len for item in suffixed] == [len(tokenizer.encode(i.prompt)) for i in suffixed]
    ids = items(tokenize_prompt=True)
    assert [item.prompt for item in ids] == [tuple(tokenizer.encode(item.prompt)) for item in plain]
    turns = items(apply_chat_template=True, prompt_suffix="!")
    for turn, item in zip(turns, plain):
        messages = [{"role": "user", "content": item.prompt + "!"}]
        assert turn.prompt == tokenizer.render_chat(messages, add_generation_prompt=True)
        assert turn.input_len == len(tokenizer.encode(turn.prompt, False))


def test_a_chat_template_is_needed_to_apply_it():
    config = DatasetConfig(dataset_name="random-ids", num_prompts=1, vocab_size=5, apply_chat_template=True)
    with pytest.raises(ConfigError, match="a tokenizer is needed"):
        load_dataset(config, None)
