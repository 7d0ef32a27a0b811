"""The tables hold exactly what the study declares."""

from __future__ import annotations

from pathlib import Path

import fake_cells
import pandas as pd
import pytest

from pipeline import cells, tables
from pipeline.results import read_table
from pipeline.study import Params
from specdec.errors import InputError
from specdec.theory import expected_tokens_per_round, iid_acceptance_length

NAMES = {
    *("sweep_k", "sweep_temperature", "acceptance_per_position", "hf_benchmark", "cost_curve", "comparison"),
    *("sweep_block", "sweep_confidence", "greedy_identity", "llama_cpp"),
    *("quantized_alpha", "quantized_contrasts", "quantized_by_category", "quantized_loop", "quantized_benchmark"),
    *("acceptance_by_category", "accepted_per_round", "speedup_by_category", "speedup_by_k"),
    *("toy_k", "toy_temperature", "toy_acceptance_per_position", "toy_benchmark"),
}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tables.py"])
    return fake_cells.write(tmp_path)


def test_every_table_is_written_in_the_order_of_params(study: Params) -> None:
    tables.main()
    assert {path.stem for path in Path("plots/fake").iterdir()} == NAMES
    by_k = read_table(Path("plots/fake"), "sweep_k")
    assert list(zip(by_k["pair"], by_k["k"], strict=True)) == [(p, k) for p in study.study.pairs for k in study.study.k]
    assert by_k.columns[:5].tolist() == ["pair", "target", "draft", "k", "temperature"]
    assert "per_prompt" not in by_k
    with_model = study.study.detail_pairs
    for name, column, values in (
        ("sweep_block", "temperature", study.study.temperature),
        ("sweep_confidence", "confidence_threshold", study.study.confidence),
        ("greedy_identity", "dtype", study.study.identity_dtypes),
    ):
        table = read_table(Path("plots/fake"), name)
        assert list(zip(table["pair"], table[column], strict=True)) == [(p, v) for p in with_model for v in values]


def test_what_the_new_tables_hold_is_what_their_cells_hold(study: Params) -> None:
    gathered = tables.gather(study)
    for name, path, keys in (
        ("sweep_block", cells.sweep_block("fake", "small_int8", 0.3), tables.ACCEPTANCE),
        ("sweep_confidence", cells.sweep_confidence("fake", "small_int8", 0.0), tables.ACCEPTANCE),
        ("greedy_identity", cells.greedy_identity("fake", "small_int8", "bfloat16"), tables.IDENTITY),
    ):
        row, record = gathered[name].iloc[0], cells.read_json(path)
        assert {key: row[key] for key in keys} == {key: record[key] for key in keys}
        assert gathered[name].columns[: len(keys)].tolist() == [*keys], "raw lists stay in the cells"
    assert not {"divergence_ulps", "first_divergences"} & {*gathered["greedy_identity"]}


def test_every_n_of_every_curve_is_a_row(study: Params) -> None:
    table = tables.gather(study)["cost_curve"]
    record = cells.read_json(cells.cost_curve("fake", "small_bf16"))
    kernels, contexts, rows = study.study.kernels_compared, study.cost_curve.contexts, study.cost_curve.rows
    assert len(table) == (3 + 2) * len(kernels) * len(contexts) * rows  # the draft that copies text has no curve
    part = table[(table["pair"] == "small_bf16") & (table["role"] == "draft") & (table["kernels"] == "joined")]
    part = part[part["context"] == 512]
    (curve,) = [c for c in record["curves"] if (c["role"], c["kernels"], c["context"]) == ("draft", "joined", 512)]
    assert part["n"].tolist() == list(range(1, rows + 1))
    for key in ("seconds", "seconds_lo", "seconds_hi", "roof_seconds"):
        assert part[key].tolist() == curve[key]
    assert set(part["model"]) == {"bf16"} and set(part["bytes_per_second"]) == {record["bytes_per_second"]}


def test_a_curve_without_a_needed_key_is_named(study: Params) -> None:
    path = cells.cost_curve("fake", "small_int8")
    curves = cells.read_json(path)["curves"]
    del curves[3]["roof_seconds"]
    fake_cells.edit(path, curves=curves)
    with pytest.raises(InputError, match=f"^{path} lacks the key roof_seconds"):
        tables.gather(study)


def test_every_contestant_of_a_comparison_is_a_row_and_so_are_kernels_that_do_not_run(study: Params) -> None:
    path = cells.comparison("fake", "small_int8")
    fake_cells.edit(path, refusals=[{"kernels": "compiled", "reason": "for a reason"}])
    table, record = tables.gather(study)["comparison"], cells.read_json(path)
    part = table[table["pair"] == "small_int8"]
    assert part["name"].tolist()[:-1] == [contestant["name"] for contestant in record["contestants"]]
    assert set(table["pair"]) == set(study.study.comparisons)
    for row, contestant in zip(part.to_dict("records"), record["contestants"], strict=False):
        for key in ("k", "kernels", "tokens_per_second", "speedup", "speedup_over_hf_assisted_hi", "identical"):
            assert row[key] == contestant[key] or (pd.isna(row[key]) and contestant[key] is None)
        assert row["best_fixed_k"] == 4 and row["fastest_plain"] == record["fastest_plain"] and pd.isna(row["refusal"])
    last = part.iloc[-1]
    assert (last["kernels"], last["refusal"]) == ("compiled", "for a reason") and pd.isna(last["name"])


def test_a_contestant_without_a_needed_key_is_named(study: Params) -> None:
    path = cells.comparison("fake", "small_lookup")
    contestants = cells.read_json(path)["contestants"]
    del contestants[1]["speedup_over_hf"]
    fake_cells.edit(path, contestants=contestants)
    with pytest.raises(InputError, match=f"^{path} lacks the key speedup_over_hf"):
        tables.gather(study)


def test_a_timed_cell_needs_no_gain_and_a_sweep_does(study: Params) -> None:
    assert "block_gain" not in tables.gather(study)["hf_benchmark"]
    path = cells.sweep_temperature("fake", "small_lookup", 0.3)
    record = cells.read_json(path)
    del record["block_gain"]
    cells.write_json(path, record)
    with pytest.raises(InputError, match=f"^{path} lacks the key block_gain"):
        tables.gather(study)


def test_two_runs_write_the_same_bytes(study: Params) -> None:
    tables.main()
    first = {path.name: path.read_bytes() for path in Path("plots/fake").iterdir()}
    tables.main()
    assert first == {path.name: path.read_bytes() for path in Path("plots/fake").iterdir()}


def test_a_cell_that_the_study_does_not_declare_is_left_out(study: Params) -> None:
    cells.write_json(cells.sweep_k("fake", "small_int8", 16), fake_cells.acceptance("small_int8", 16))
    cells.write_json(cells.sweep_k("fake", "old_pair", 4), fake_cells.acceptance("small_int8", 4))
    by_k = tables.gather(study)["sweep_k"]
    assert 16 not in by_k["k"].tolist()
    assert set(by_k["pair"]) == set(study.study.pairs)


@pytest.mark.parametrize(
    "path",
    [
        *("sweep_k/fake/small_bf16/2.json", "toy/temperature/0.2.json", "toy/benchmark.json"),
        *("sweep_block/fake/small_int8/1.0.json", "sweep_confidence/fake/small_int8/0.4.json"),
        *("greedy_identity/fake/small_int8/float16.json", "cost_curve/fake/small_bf16.json"),
        "comparison/fake/small_lookup.json",
        *("quantized_alpha/few/small_int8/w3-row-rtn.json", "quantized_loop/few/small_int8/bf16.json"),
        "quantized_benchmark/fake/small_int8/w4-g64-gptq.json",
    ],
)
def test_a_missing_cell_is_named_and_no_table_is_touched(study: Params, path: str) -> None:
    (cells.METRICS / path).unlink()
    with pytest.raises(InputError, match=f"^metrics/{path} cannot be read .*dvc repro"):
        tables.main()
    assert not Path("plots").exists()


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (cells.hf_benchmark("fake", "small_int8", 4), "overhead_factor"),
        (cells.toy_k(3), "tested_per_position"),
        (cells.toy_temperature(0.5), "argmax_agreement"),
        (cells.toy_k(2), "per_prompt"),
        (cells.sweep_k("fake", "small_int8", 2), "acceptance_per_position_lo"),
        (cells.toy_benchmark(), "unrepeatable_runs"),
        (cells.toy_temperature(1.0), "block_gain_hi"),
        (cells.sweep_block("fake", "small_int8", 1.5), "verifier"),
        (cells.sweep_confidence("fake", "small_int8", 0.8), "confidence_threshold"),
        (cells.greedy_identity("fake", "small_int8", "bfloat16"), "share_within_limit"),
        (cells.quantized_alpha("few", "small_int8", "w3-row-rtn"), "temperatures"),
        (cells.quantized_alpha("few", "small_int8", "w3-row-rtn"), "body_alpha_change_0_7_hi"),
        (cells.quantized_alpha("few", "small_int8", "bf16"), "perplexity_unquantized_greedy"),
        (cells.quantized_loop("few", "small_int8", "bf16"), "temperatures"),
        (cells.quantized_loop("few", "small_int8", "w4-g64-gptq"), "tested_1"),
        (cells.quantized_benchmark("fake", "small_int8", "bf16"), "draft_bytes"),
        (cells.hf_benchmark("fake", "small_int8", 4), "kernels"),
        (cells.hf_benchmark("fake", "small_int8", 4), "speedup_over_hf_assisted_hi"),
        (cells.cost_curve("fake", "small_int8"), "bytes_per_second"),
        (cells.cost_curve("fake", "small_int8"), "curves"),
        (cells.comparison("fake", "small_lookup"), "contestants"),
        (cells.comparison("fake", "small_lookup"), "refusals"),
        (cells.comparison("fake", "small_int8"), "auto_over_best_fixed_k_hi"),
    ],
)
def test_a_cell_without_a_needed_key_is_named(study: Params, path: Path, key: str) -> None:
    record = cells.read_json(path)
    del record[key]
    cells.write_json(path, record)
    with pytest.raises(InputError, match=f"^{path} lacks the key {key}"):
        tables.gather(study)


def test_numbers_survive_the_file(study: Params) -> None:
    fake_cells.edit(cells.hf_benchmark("fake", "small_int8", 4), speedup=1.23456789, speedup_lo=None, speedup_hi=None)
    tables.main()
    row = read_table(Path("plots/fake"), "hf_benchmark").iloc[0]
    assert row["speedup"] == 1.23457  # six digits
    assert pd.isna(row["speedup_lo"])
    lines = Path("plots/fake/hf_benchmark.csv").read_text(encoding="utf-8").splitlines()
    assert ",134515008," in lines[1], "a count is not rounded"
    assert ",134515008,," in lines[3], "and stays whole in a column with a missing value"


def test_a_pair_may_have_a_name_that_looks_like_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, study: Params
) -> None:
    for name in ("123", "null"):
        text = fake_cells.PARAMS.replace("small_int8", name).replace(f"  {name}:", f'  "{name}":')
        text = text.replace(f"[{name},", f'["{name}",').replace(f"[{name}]", f'["{name}"]')
        monkeypatch.setitem(fake_cells.ALPHA, name, 0.9)
        monkeypatch.setitem(fake_cells.C, name, 0.5)
        fake_cells.write(tmp_path, text)
        tables.main()
        assert read_table(Path("plots/fake"), "sweep_k")["pair"].iloc[0] == name


def test_positions_are_unrolled(study: Params) -> None:
    table = tables.gather(study)["acceptance_per_position"]
    assert len(table) == len(study.study.pairs) * sum(study.study.k)
    part = table[(table["pair"] == "small_bf16") & (table["k"] == 4)]
    record = cells.read_json(cells.sweep_k("fake", "small_bf16", 4))
    assert part["position"].tolist() == [1, 2, 3, 4]
    assert part["acceptance_per_position"].tolist() == record["acceptance_per_position"]
    assert part["conditional_acceptance_per_position"].tolist() == record["conditional_acceptance_per_position"]
    assert part["tested"].tolist() == record["tested_per_position"]
    for end in ("lo", "hi"):
        for key in (f"acceptance_per_position_{end}", f"conditional_acceptance_per_position_{end}"):
            assert part[key].tolist() == record[key]


def test_a_position_without_an_interval_has_empty_fields(study: Params) -> None:
    fake_cells.edit(cells.sweep_k("fake", "small_int8", 2), acceptance_per_position_lo=[0.9, None])
    tables.main()
    table = read_table(Path("plots/fake"), "acceptance_per_position")
    low = table.loc[(table["pair"] == "small_int8") & (table["k"] == 2), "acceptance_per_position_lo"].tolist()
    assert low[0] == 0.9 and pd.isna(low[1])


def test_the_geometric_form_uses_alpha_of_k_1(study: Params) -> None:
    table = tables.gather(study)["toy_k"]
    alpha = cells.read_json(cells.toy_k(1))["alpha"]
    expected = [expected_tokens_per_round(alpha, k) for k in study.toy.k]
    assert table["geometric_tokens_per_round"].tolist() == pytest.approx(expected)
    assert (
        table["difference"].tolist() == (table["mean_acceptance_length"] - table["geometric_tokens_per_round"]).tolist()
    )


def test_the_geometric_form_counts_a_shortened_last_round_as_it_was(study: Params) -> None:
    prompts = [{"per_round_drafted": [4, 4, 1]}, {"per_round_drafted": [4, 0]}]
    fake_cells.edit(cells.toy_k(4), per_prompt=prompts)
    (row,) = [row for row in tables.gather(study)["toy_k"].to_dict("records") if row["k"] == 4]
    alpha = cells.read_json(cells.toy_k(1))["alpha"]
    geometric = row["geometric_tokens_per_round"]
    assert geometric == iid_acceptance_length(alpha, [4, 4, 1, 4, 0])
    assert geometric == pytest.approx((3 * (1 - alpha**5) / (1 - alpha) + (1 + alpha) + 1) / 5)
    assert geometric < expected_tokens_per_round(alpha, 4)
    assert row["difference"] == row["mean_acceptance_length"] - geometric


def test_a_toy_cell_without_its_drafted_tokens_is_named(study: Params) -> None:
    fake_cells.edit(cells.toy_k(3), per_prompt=[{"question_id": 1, "per_round_proposed": [3]}])
    with pytest.raises(InputError, match=r"^metrics/toy/k/3\.json lacks the key per_round_drafted; .*dvc repro"):
        tables.gather(study)


def test_without_k_1_there_is_no_geometric_form(study: Params, tmp_path: Path) -> None:
    params = fake_cells.write(tmp_path, fake_cells.PARAMS.replace("k: [1, 2, 3, 4, 5, 6, 7, 8]", "k: [2, 4]"))
    table = tables.gather(params)["toy_k"]
    assert table["geometric_tokens_per_round"].isna().all() and table["difference"].isna().all()


def test_a_draft_that_never_proposed_leaves_empty_fields(study: Params) -> None:
    nothing = dict.fromkeys(("alpha", "alpha_overlap", "draft_acceptance_rate", "iid_acceptance_length"))
    lists: dict[str, list[float]] = {key: [] for key in tables.POSITION_LISTS.values()}
    fake_cells.edit(cells.sweep_k("fake", "small_lookup", 1), **nothing, **lists)
    tables.main()
    by_k = read_table(Path("plots/fake"), "sweep_k")
    assert by_k[(by_k["pair"] == "small_lookup") & (by_k["k"] == 1)]["alpha"].isna().all()


def test_a_table_that_is_not_there_is_named(study: Params) -> None:
    with pytest.raises(InputError, match=r"^plots/fake/sweep_k\.csv cannot be read .*dvc repro tables"):
        read_table(Path("plots/fake"), "sweep_k")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a table; `dvc repro tables` writes it anew"),
        (b"pair,k\n\xff\xfe,1\n", "is not a table"),
        (b"<<<<<<< HEAD\npair,k\n", "has no column pair, which every table has"),
    ],
)
def test_a_file_that_is_no_table_is_named(study: Params, content: bytes, message: str) -> None:
    path = Path("plots/fake/sweep_k.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^{path} {message}"):
        read_table(path.parent, "sweep_k")


def test_categories_of_prompts_beside_all_of_them(study: Params) -> None:
    gathered = tables.gather(study)
    acceptance, speedup = gathered["acceptance_by_category"], gathered["speedup_by_category"]
    assert set(acceptance["k"]) == {4}, "the k of the timed cells"
    for table, key, record in (
        (acceptance, "alpha", cells.read_json(cells.sweep_k("fake", "small_bf16", 4))),
        (speedup, "speedup", cells.read_json(cells.hf_benchmark("fake", "small_bf16", 4))),
    ):
        part = table[table["pair"] == "small_bf16"]
        assert part["category"].tolist() == ["all prompts", "qa", "multi_turn"]
        assert part["prompts"].tolist() == [12, 6, 6]
        ends = [key, f"{key}_lo", f"{key}_hi"]
        assert part.iloc[0][ends].tolist() == [record[end] for end in ends], "the cell's own"
        assert part.iloc[1:][ends[1:]].isna().all(axis=None), "too few prompts for an interval"
        assert (part[f"{key}_lowest"] <= part[key] + 1e-9).all() and (part[key] <= part[f"{key}_highest"] + 1e-9).all()
    odd, even = speedup.iloc[2], speedup.iloc[1]
    assert odd["speedup"] == pytest.approx(even["speedup"] * 0.95 / 1.05)
    assert odd["speedup_lowest"] == odd["speedup_highest"] == pytest.approx(odd["speedup"])


def test_a_category_of_many_prompts_has_an_interval_of_its_own(study: Params) -> None:
    path = cells.sweep_k("fake", "small_int8", 4)
    prompts = [p | {"category": "qa"} for p in cells.read_json(path)["per_prompt"]]
    fake_cells.edit(path, per_prompt=prompts)
    whole, category = tables.gather(study)["acceptance_by_category"].to_dict("records")[:2]
    assert category["alpha_lo"] < category["alpha"] < category["alpha_hi"]
    assert category["alpha"] == pytest.approx(whole["alpha"])


def test_a_category_without_a_tested_token_has_no_alpha(study: Params) -> None:
    path = cells.sweep_k("fake", "small_lookup", 4)
    prompts = cells.read_json(path)["per_prompt"]
    for prompt in prompts[::2]:
        prompt |= {"per_round_accepted": [0, 0], "per_round_proposed": [0, 0]}
    fake_cells.edit(path, per_prompt=prompts)
    table = tables.gather(study)["acceptance_by_category"]
    part = table[table["pair"] == "small_lookup"]
    assert part["alpha"].isna().tolist() == part["alpha_lowest"].isna().tolist() == [False, True, False]


def test_seconds_may_be_written_as_text_and_tokens_be_counted_apart(study: Params) -> None:
    before = tables.gather(study)["speedup_by_category"]
    path = cells.hf_benchmark("fake", "small_int8", 4)
    samples = cells.read_json(path)["samples"]
    for sample in samples:
        seconds = {method: " ".join(map(str, runs)) for method, runs in sample["decode_seconds"].items()}
        sample |= {"decode_seconds": seconds, "decoded": {"ar": 31, "spec": 31}}
    fake_cells.edit(path, samples=samples)
    assert tables.gather(study)["speedup_by_category"]["speedup"].tolist() == pytest.approx(before["speedup"].tolist())


def test_shares_of_rounds_by_accepted_tokens(study: Params) -> None:
    table = tables.gather(study)["accepted_per_round"]
    record = cells.read_json(cells.sweep_k("fake", "small_int8", 8))
    part = table[(table["pair"] == "small_int8") & (table["k"] == 8)]
    accepted = [n for prompt in record["per_prompt"] for n in prompt["per_round_accepted"]]
    assert part["accepted_per_round"].tolist() == list(range(9))
    assert part["rounds"].tolist() == [accepted.count(n) for n in range(9)]
    assert part["share"].tolist() == [accepted.count(n) / 120 for n in range(9)]
    assert part["share"].sum() == pytest.approx(1) and part["iid_share"].sum() == pytest.approx(1)
    alpha = record["alpha"]
    assert part["iid_share"].tolist() == pytest.approx([alpha**n * (1 - alpha) for n in range(8)] + [alpha**8])
    assert ((part["share_lo"] <= part["share"]) & (part["share"] <= part["share_hi"])).all()
    assert (part["accepted_per_round"] * part["iid_share"]).sum() + 1 == pytest.approx(record["iid_acceptance_length"])


def test_the_prediction_of_a_share_is_for_rounds_of_the_same_lengths(study: Params) -> None:
    path = cells.sweep_k("fake", "small_int8", 2)
    prompt = {"question_id": 0, "category": "qa", "per_round_accepted": [1, 2], "per_round_proposed": [1, 2]}
    fake_cells.edit(path, alpha=0.5, per_prompt=[prompt | {"per_round_drafted": [1, 2]}])
    table = tables.gather(study)["accepted_per_round"]
    part = table[(table["pair"] == "small_int8") & (table["k"] == 2)]
    assert part["iid_share"].tolist() == [0.5, (0.5 + 0.25) / 2, 0.25 / 2]
    assert part["share_lo"].isna().all(), "one prompt"


def test_a_pair_is_timed_by_k_in_the_run_with_more_of_them(study: Params) -> None:
    table = tables.gather(study)["speedup_by_k"]
    runs = {pair: set(part["stage"]) for pair, part in table.groupby("pair")}
    assert runs == {"small_int8": {"comparison"}, "small_bf16": {"hf_benchmark"}, "small_lookup": {"hf_benchmark"}}
    part = table[table["pair"] == "small_int8"]
    assert part["k"].tolist() == [2, 4, 8] and set(part["kernels"]) == {"packed"}, "no k = auto, nor other kernels"
    tau = (1 - 0.9**4.5) / (1 - 0.9)
    assert part["ideal_speedup"].tolist() == [pytest.approx(tau / (3.5 * fake_cells.C["small_int8"] + 1))] * 3


def test_every_k_has_the_geometric_form_with_the_alpha_of_its_pairs_k_of_one(study: Params) -> None:
    by_k = tables.gather(study)["sweep_k"]
    alphas = by_k[by_k["k"] == 1].set_index("pair")["alpha"]
    for row in by_k.to_dict("records"):
        assert row["geometric_tokens_per_round"] == pytest.approx(
            expected_tokens_per_round(alphas[row["pair"]], row["k"])
        )


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (cells.comparison("fake", "small_int8"), "kernels_run"),
        (cells.hf_benchmark("fake", "small_int8", 4), "samples"),
        (cells.sweep_k("fake", "small_int8", 8), "per_prompt"),
    ],
)
def test_a_cell_that_cannot_be_looked_into_is_named(study: Params, path: Path, key: str) -> None:
    record = cells.read_json(path)
    del record[key]
    cells.write_json(path, record)
    with pytest.raises(InputError, match=f"^{path} lacks the key {key}"):
        tables.gather(study)
