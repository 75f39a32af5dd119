"""How kernels are tuned: explicit options, then the table of the GPU generation, then a rule of thumb."""

import copy
import json

import pytest

from hybridjax.errors import ConfigError
from hybridjax.pallas_kernels import tuning

FINE, COARSE, RULE = (
    {"columns": columns, "stages": stages, "resident": None}
    for columns, stages in ((32, 1), (64, 1), (128, 2))
)
TABLE = {
    "architecture": "sm_90",
    "processors": 132,
    "measured_on": "a test",
    "sources": {"simple_gla_decode": "here", "nvfp4_product": "here"},
    "ops": {
        "simple_gla_decode": [{"states_at_most": 264, "options": FINE}, {"options": COARSE}],
        "nvfp4_product": [
            {
                "columns": 4096,
                "features": 512,
                "tokens_at_most": 16,
                "options": {"rows": 64, "splits": 2, "stages": 3},
            }
        ],
    },
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the table above, read afresh."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.write(tmp_path / "sm_90.json", TABLE)
    tuning.load.cache_clear()
    yield tmp_path
    tuning.load.cache_clear()


def choose(states=300, architecture="sm_90", processors=132, **options):
    return tuning.choose(
        "simple_gla_decode", architecture, processors, {"states": states}, heuristic=lambda: RULE, **options
    )


def test_explicit_options_win_over_the_table_and_the_table_over_the_heuristic(folder):
    assert choose(264) == tuning.Choice(FINE, "table", "sm_90.json: simple_gla_decode[0]")
    assert choose(265) == tuning.Choice(COARSE, "table", "sm_90.json: simple_gla_decode[1]")
    assert choose(override=RULE) == tuning.Choice(RULE, "explicit")
    assert choose(override={"stages": 5}).options == {**COARSE, "stages": 5}
    assert choose(override={"stages": 5}).source == "explicit"


@pytest.mark.parametrize(
    "elsewhere", [{"architecture": "sm_100"}, {"processors": 114}, {"architecture": "cpu"}]
)
def test_a_gpu_that_was_not_measured_takes_the_heuristic(folder, elsewhere):
    assert choose(**elsewhere) == tuning.Choice(RULE, "heuristic")
    assert choose(override={"stages": 5}, **elsewhere).options == {**RULE, "stages": 5}


def test_every_condition_of_an_entry_must_hold(folder):
    fits = {"tokens": 16, "columns": 4096, "features": 512, "blocks": 1}
    assert tuning.lookup("nvfp4_product", "sm_90", 132, fits).options["splits"] == 2
    for name, other in {"tokens": 17, "columns": 2048, "features": 1024}.items():
        assert tuning.lookup("nvfp4_product", "sm_90", 132, {**fits, name: other}) is None


def test_an_op_without_entries_takes_the_heuristic(folder):
    shape = {"tokens": 64, "sequences": 1, "heads": 4}
    chosen = tuning.choose("gated_delta_prefill", "sm_90", 132, shape, heuristic=lambda: {"stages": 2})
    assert chosen == tuning.Choice({"stages": 2}, "heuristic")


@pytest.mark.parametrize(
    "options, named",
    [
        ({"column": 32}, "override of simple_gla_decode: unknown option 'column'; known: columns, stages"),
        ({"columns": 48}, "override of simple_gla_decode.columns is 48; allowed: 32, 64, 128"),
        ({"stages": True}, "override of simple_gla_decode.stages is True"),
        ({"stages": None}, "override of simple_gla_decode.stages is None"),
    ],
)
def test_a_wrong_override_is_named(folder, options, named):
    with pytest.raises(ConfigError, match=named):
        choose(override=options)


def test_unknown_ops_and_shapes_are_named(folder):
    with pytest.raises(ConfigError, match="unknown op 'attention'"):
        tuning.choose("attention", "sm_90", 132, {}, heuristic=dict)
    with pytest.raises(ConfigError, match=r"simple_gla_decode: shape names \['rows'\]; it has \['states'\]"):
        tuning.choose("simple_gla_decode", "sm_90", 132, {"rows": 1}, heuristic=dict)


def _at(table, path):
    for name in path:
        table = table[name]
    return table


DECODE = ("ops", "simple_gla_decode")
BROKEN = {
    "a field": ((), "proccessors", 132, "unknown field 'proccessors'; known: architecture, processors"),
    "a count": ((), "processors", "132", "processors is '132'; it must be of type int"),
    "an op": (
        ("ops",),
        "simple_gla",
        [],
        "ops.simple_gla: unknown op 'simple_gla'; known: simple_gla_decode",
    ),
    "no list": (("ops",), "simple_gla_decode", FINE, "ops.simple_gla_decode is {.*; it must be a list"),
    "no options": (
        DECODE,
        1,
        {"states": 4},
        r"ops.simple_gla_decode\[1\] is {.*must be an object with options",
    ),
    "a condition": (
        (*DECODE, 0),
        "states_atmost",
        4,
        r"\[0\]: unknown condition 'states_atmost'; known: states,",
    ),
    "a bound": (
        (*DECODE, 0),
        "states_at_most",
        "264",
        r"\[0\].states_at_most is '264'; it must be a positive",
    ),
    "an option": (
        (*DECODE, 1, "options"),
        "colums",
        64,
        r"\[1\].options: unknown option 'colums'; known: columns",
    ),
    "a value": ((*DECODE, 1, "options"), "columns", 96, r"\[1\].options.columns is 96; allowed: 32, 64, 128"),
    "a float": ((*DECODE, 1, "options"), "columns", 64.5, r"\[1\].options.columns is 64.5; allowed"),
    "no source": (("sources",), "simple_gla_decode", 3, "sources.simple_gla_decode is 3"),
    "a source": (("sources",), "recurrent_commit", "x", "sources names recurrent_commit; ops has no such op"),
    "order": (DECODE, 0, {"options": FINE}, r"\[0\] has no condition, so that no entry behind it is reached"),
    "another": ((), "architecture", "sm_100", "architecture is 'sm_100'; its name says 'sm_90'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_table_is_refused_with_file_field_and_value(folder, kind):
    path, name, value, named = BROKEN[kind]
    table = copy.deepcopy(TABLE)
    _at(table, path)[name] = value
    (folder / "sm_90.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"sm_90\.json: .*" + named):
        choose()


def test_missing_options_and_files_that_are_no_json_are_refused(folder):
    table = copy.deepcopy(TABLE)
    del _at(table, (*DECODE, 1, "options"))["stages"]
    with pytest.raises(ConfigError, match=r"\[1\].options lacks stages"):
        tuning.write(folder / "other.json", table)
    assert not (folder / "other.json").exists()
    (folder / "sm_90.json").write_text("{,}")
    with pytest.raises(ConfigError, match=r"sm_90.json: not JSON"):
        choose()


def test_a_table_survives_writing_and_reading(folder):
    assert tuning.read(folder / "sm_90.json") == TABLE


def test_shipped_tables_are_written_as_the_tool_writes_them(tmp_path):
    shipped = sorted(tuning.FOLDER.glob("*.json"))
    assert [file.name for file in shipped] == ["sm_90.json"]
    for file in shipped:
        tuning.write(tmp_path / file.name, tuning.load(file.stem))
        assert file.read_text() == (tmp_path / file.name).read_text()


def test_entries_bound_sizes_from_above_and_join_equal_choices():
    timed = {32: (1.0, 2.0), 256: (1.005, 1.0), 384: (1.1, 1.0), 2048: (2.0, 1.0)}
    measured = [
        ({"states": size}, options, times[i])
        for size, times in timed.items()
        for i, options in enumerate((FINE, COARSE))
    ]
    assert tuning.entries(measured, "states") == [
        {"states_at_most": 256, "options": FINE},  # slower than the other by less than what noise does
        {"options": COARSE},
    ]
    assert tuning.entries(measured, "states", tolerance=0.0)[0] == {"states_at_most": 32, "options": FINE}


def test_entries_of_shapes_that_must_be_equal_stand_apart():
    measured = [
        ({"tokens": tokens, "columns": columns}, {"rows": rows}, time)
        for columns, tokens, rows, time in ((64, 1, 64, 1.0), (64, 16, 128, 1.0), (32, 1, 64, 1.0))
    ]
    assert tuning.entries(measured, "tokens", exact=("columns",)) == [
        {"columns": 32, "options": {"rows": 64}},
        {"columns": 64, "tokens_at_most": 1, "options": {"rows": 64}},
        {"columns": 64, "options": {"rows": 128}},
    ]
