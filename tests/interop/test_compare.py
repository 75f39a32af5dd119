"""The command line of the comparison, with stand-ins for the other Python."""

import json
import os
import time
from pathlib import Path

import compare
import pytest
from comparison import InteropError

HERE = Path(__file__).parent
MODEL = HERE.parent / "goldens" / "qwen4_exp" / "text_no_ple"


@pytest.fixture
def python(tmp_path):
    """Makes an executable of a shell script; $2 is the request, $3 where answers go."""

    def make(script):
        file = tmp_path / "python"
        file.write_text("#!/bin/sh\n" + script)
        file.chmod(0o755)
        return str(file)

    return make


def test_answers_come_back_as_tensors_and_facts(python, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    seen = tmp_path / "seen"
    program = python(f'cp "$2" {seen}; echo "$1 $PYTHONPATH." >> {seen}; cp {HERE}/answers.safetensors "$3"')
    tensors, facts = compare.ask_transformers(program, {"model": "a b"}, 60)
    request, rest = seen.read_text().rsplit("}", 1)
    assert json.loads(request + "}") == {"model": "a b"}
    assert rest.strip() == f"{compare.ANSWERS} ."
    assert tensors["0.logits"].shape == (41, 256)
    assert facts["transformers"] == "5.24.0" and facts["class"] == "Qwen4ExpForCausalLM"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no torch here >&2; exit 3", r"ended with status 3:\n    no torch here"),
        ("exit 0", "wrote no readable answers"),
        ('echo rubbish > "$3"; echo hint', r"(?s)wrote no readable answers: .*hint"),
        ("kill -9 $$", "ended with status -9"),
    ],
)
def test_a_process_that_fails(python, script, message):
    with pytest.raises(InteropError, match=message):
        compare.ask_transformers(python(script), {}, 60)


def test_a_python_that_does_not_exist():
    with pytest.raises(InteropError, match="/no/python does not start"):
        compare.ask_transformers("/no/python", {}, 60)


def test_a_process_that_takes_too_long_is_ended_with_its_children(python, tmp_path):
    pid = tmp_path / "pid"
    program = python(f"echo loading >&2; sleep 600 & echo $! > {pid}; wait")
    with pytest.raises(InteropError, match=r"no answer within 1 s:\n    loading"):
        compare.ask_transformers(program, {}, 1)
    child = int(pid.read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(child, 9)
    pytest.fail("the child lives on")


def closing(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])["interop"]


def test_what_cannot_be_compared_is_an_error_row_and_status_2(python, capsys):
    status = compare.main([str(MODEL), "/no/model", "--torch-python", python("exit 1")])
    assert status == 2
    first, second = closing(capsys)
    assert first["result"] == second["result"] == "error"
    assert "ended with status 1" in first["error"]
    assert "neither a directory nor a bundled model" in second["error"]


def test_a_refusal_is_shown_as_it_is(python, capsys, tmp_path):
    from safetensors.numpy import save_file

    save_file({}, tmp_path / "refusal", metadata={"refusal": "transformers 9 does not know architecture 'X'"})
    program = python(f'cp {tmp_path}/refusal "$3"')
    assert compare.main([str(MODEL), "--torch-python", program]) == 2
    shown = capsys.readouterr().out
    assert "error: transformers 9 does not know architecture 'X'\n" in shown


def test_exit_status_follows_the_worst_result(monkeypatch, capsys):
    base = {
        "model": "m",
        "dtype": "float32",
        "tolerance": 1.0,
        "class": "C",
        "transformers": "5",
        "torch": "2",
    }
    row = {
        "prompt": "p", "tokens": 2, "max_error": float("nan"), "median_error": 0.5, "rows": 3, "rows_over": 1,
        "argmax_equal": 2, "ties_exact": 1, "ties_near": 0, "max_error_ties_aside": 0.25,
        "greedy": {"new_tokens": 2, "model": 2}, "result": "tie", "notes": ["a note"],
    }  # fmt: skip
    for results, status in ((["ok", "tie"], 0), (["error", "DIFFERS"], 1), (["ok", "error"], 2)):
        queue = iter(results)

        def report(name, arguments, queue=queue):
            result = next(queue)
            if result == "error":
                raise InteropError("why")
            return {**base, "rows": [row], "unread_tensors": [], "result": result}

        monkeypatch.setattr(compare, "compare_model", report)
        assert compare.main(["a", "b", "--torch-python", "python"]) == status
        out = capsys.readouterr().out
        assert [r["result"] for r in json.loads(out.splitlines()[-1])["interop"]] == results
        if "ok" in results:
            assert json.loads(out.splitlines()[-1])["interop"][0]["rows"][0]["max_error"] is None
            assert "  p: a note" in out and "2/2" in out and "1+0" in out


def test_random_prompts_avoid_placeholders_and_reach_beyond_the_budget():
    config = compare.load_config(HERE.parent / "goldens" / "qwen4_exp" / "multimodal")
    arguments = compare.parse(["m", "--torch-python", "p", "--length", "10", "--image", __file__])
    prompts = compare.make_prompts(config, None, arguments)
    assert [len(p.ids) for p in prompts] == [2, 6, 10, 16 + 2 * 4 + 3, 11 + 3 + 7]
    special = {290, 291, 292, 293}
    assert not special & {i for p in prompts[:-1] for i in p.ids}
    assert [i for i in prompts[-1].ids if i in special] == [292, 290, 293] and prompts[-1].image
    assert compare.make_prompts(config, None, arguments) == prompts


def test_texts_need_a_tokenizer(tmp_path):
    config = compare.load_config(MODEL)
    file = tmp_path / "texts"
    file.write_text("one\n\ntwo\n", encoding="utf-8")
    arguments = compare.parse(["m", "--torch-python", "p", "--prompts", str(file)])
    with pytest.raises(InteropError, match=r"--prompts needs a tokenizer\.json"):
        compare.make_prompts(config, None, arguments)
    prompts = compare.make_prompts(config, compare.load_tokenizer("tiny-sala"), arguments)
    assert [p.text for p in prompts if p.text] == ["one", "two"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--length", "0"],
        ["--tolerance", "-1"],
        ["--timeout", "nan"],
        ["--image", "/no/file"],
        ["--dtype", "float64"],
    ],
)
def test_flags_that_cannot_work(flags, capsys):
    with pytest.raises(SystemExit) as error:
        compare.parse(["m", "--torch-python", "p", *flags])
    assert error.value.code == 2
    assert flags[0] in capsys.readouterr().err
