"""Variants of a draft: their names, the texts behind which they are judged, and what a cell says of them."""

import json
import math
from dataclasses import replace

import pytest
import torch
from stand_ins import nearby, tiny_gpt2, tiny_llama

from pipeline import cells, contexts, quantized_alpha, quantized_benchmark, quantized_loop, variants
from pipeline.cells import label
from pipeline.prompts import Prompt
from pipeline.quantized_alpha import Bodies, Body, greedy_sums, judge, sampled_sums
from pipeline.texts import Text, first_per_category, hashes, read_contexts
from pipeline.variants import Unquantized, parse
from specdec.errors import InputError
from specdec.grid import Grid
from specdec.lowbit import Recipe, cast_copy, lowbit_copy
from specdec.stats import AcceptanceStats, Round

V = 40


def laws(seed, rows=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, V, generator=generator, dtype=torch.float64).pow(4).softmax(dim=-1)


def text(seed=0, new=9):
    generator = torch.Generator().manual_seed(seed)
    prompt, answer, best = (torch.randint(V, (n,), generator=generator) for n in (5, new, new))
    return Text(seed, "qa", prompt, answer, best, -3.5)


# Names


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("w4-g64-gptq", Recipe(Grid(4, 64), "gptq")),
        ("w3-row-rtn", Recipe(Grid(3), "rtn")),
        ("w8-row-sym-rtn", Recipe(Grid(8, None, "sym"), "rtn")),
        ("w4-g32-min-awq", Recipe(Grid(4, 32, "min"), "awq")),
    ],
)
def test_names_of_variants(name, recipe):
    variant = parse(name)
    assert variant.recipe == recipe
    keys = variant.keys()
    assert keys["variant"] == name and keys["bits"] == recipe.grid.bits and keys["grid"] == recipe.grid.kind
    assert keys["group_size"] == recipe.grid.group_size and keys["method"] == recipe.method


def test_casts():
    model = tiny_llama()
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        variant = parse(name)
        assert variant.keys() == {
            "variant": name,
            "bits": 16,
            "group_size": None,
            "grid": None,
            "method": "cast",
        }
        weight = variant.of(model, []).model.lm_head.weight
        assert weight.dtype == torch.float32 and torch.equal(weight, model.lm_head.weight.to(dtype).float())


# Texts


def record_of(*texts):
    rows = [text.record() for text in texts]
    record = {"greedy": rows, "sampled": rows, "calibration": ["1 2 3"], "temperatures": [0.7, 1.0]}
    return record | hashes(record)


def test_texts_come_back_from_their_file(tmp_path):
    cells.write_json(tmp_path / "c.json", record_of(text(0), text(1)))
    found = read_contexts(tmp_path / "c.json")
    for wanted, got in zip([text(0), text(1)], found.greedy, strict=True):
        assert (got.question_id, got.category, got.log_likelihood) == (wanted.question_id, "qa", -3.5)
        assert all(torch.equal(getattr(got, name), getattr(wanted, name)) for name in ("prompt", "new_tokens", "best"))
    assert found.calibration[0].tolist() == [1, 2, 3] and found.temperatures == [0.7, 1.0]


@pytest.mark.parametrize("key", ["greedy", "calibration", "contexts_sha256", "temperatures"])
def test_a_file_without_a_part_is_refused(tmp_path, key):
    record = record_of(text())
    del record[key]
    cells.write_json(tmp_path / "c.json", record)
    with pytest.raises(InputError, match=rf"c.json holds no contexts \('{key}'\); `dvc repro -f contexts` writes them"):
        read_contexts(tmp_path / "c.json")


def test_a_file_changed_by_hand_is_refused(tmp_path):
    record = record_of(text())
    record["calibration"] = ["1 2 4"]
    cells.write_json(tmp_path / "c.json", record)
    with pytest.raises(InputError, match=r"c.json does not have the hashes that it names; bring it back"):
        read_contexts(tmp_path / "c.json")


def test_hashes_know_every_token_and_nothing_else():
    one = record_of(text(0))
    assert hashes({**one, "temperatures": [1.0]}) == hashes(one) == hashes(json.loads(json.dumps(one, sort_keys=True)))
    other = record_of(replace(text(0), new_tokens=text(0).new_tokens.flip(0)))
    assert other["contexts_sha256"] != one["contexts_sha256"]
    assert other["calibration_sha256"] == one["calibration_sha256"]


def test_first_texts_of_each_category():
    texts = [replace(text(i), category=category) for i, category in enumerate("aabbab")]
    assert [t.question_id for t in first_per_category(texts, 1)] == [0, 2]
    assert [t.question_id for t in first_per_category(texts, 2)] == [0, 1, 2, 3]


# Writing them


@pytest.fixture(scope="module")
def target():
    return tiny_llama(vocab_size=V)


def alone(model, prompt, new, ends):
    """Greedy decoding of one prompt, token by token and without a cache."""
    tokens = prompt.tolist()
    for _ in range(new):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def test_a_batch_writes_what_each_text_alone_would_be(target):
    prompts = [torch.arange(2, 2 + n) for n in (3, 11, 7)]
    free = [alone(target, prompt, 12, []) for prompt in prompts]
    ends = [free[1][4], free[2][0]]  # so that texts end at different places
    rows = contexts.generate(target, prompts, 12, ends, sample=False)
    assert [row.tolist() for row in rows] == [alone(target, prompt, 12, ends) for prompt in prompts]
    assert rows[1][-1] in ends and len(rows[1]) < 12


def test_sampled_texts_follow_the_target_at_temperature_1(target, monkeypatch):
    """The first token's law, by how often each came: no filter of generation_config.json may be at work."""
    monkeypatch.setattr(target.generation_config, "temperature", 0.1)
    monkeypatch.setattr(target.generation_config, "top_k", 2)
    prompt = torch.tensor([3, 4, 5])
    with torch.inference_mode():
        p = target(prompt[None]).logits[0, -1].softmax(dim=-1)
    torch.manual_seed(0)
    drawn = torch.cat(contexts.generate(target, [prompt] * 4000, 1, [], sample=True))
    counts = torch.bincount(drawn, minlength=V) / len(drawn)
    assert float((counts - p).abs().sum() / 2) < 0.04


class Loaded:
    def __init__(self, target):
        self.target, self.end_tokens = target, []


def test_answers_are_repeatable_and_leave_the_global_generator_alone(target, monkeypatch):
    monkeypatch.setattr(contexts, "encode_prompt", lambda _, prompt: torch.tensor([[2, 3, prompt.question_id]]))
    loaded = Loaded(target)
    loaded.tokenizer = None
    prompts = [Prompt(i, "qa", ("x",)) for i in range(5, 9)]
    before = torch.get_rng_state()
    one, same, other = (contexts.answers(loaded, prompts, 6, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [a.tolist() for _, a in one] == [a.tolist() for _, a in same] != [a.tolist() for _, a in other]
    assert [prompt.tolist() for prompt, _ in one] == [[2, 3, i] for i in range(5, 9)]
    with pytest.raises(InputError, match=r"300 new tokens behind a prompt of 3 are more than the 256 that the target"):
        contexts.answers(loaded, prompts, 300, None)


def test_judged_texts_have_the_targets_argmax_and_likelihood(target):
    ids, new = torch.tensor([3, 4, 5]), torch.tensor([7, 8, 9, 10])
    (found,) = contexts.judged_texts(Loaded(target), [Prompt(1, "qa", ("x",))], [(ids, new)])
    with torch.inference_mode():
        logits = torch.stack([target(torch.cat([ids, new[:n]])[None]).logits[0, -1] for n in range(4)])
    assert found.best.tolist() == logits.argmax(dim=-1).tolist()
    want = float(logits.log_softmax(dim=-1)[range(4), new].sum())
    assert found.log_likelihood == pytest.approx(want, rel=1e-5)


# Judging variants


def test_greedy_sums_by_hand():
    variant, base, best = (torch.tensor(ids) for ids in ([1, 2, 3, 4, 5], [1, 2, 9, 9, 8], [1, 7, 3, 9, 6]))
    sums = greedy_sums({"": variant, "body_": base}, base, best)
    assert sums["positions_0"] == 5 and sums["base_overlap_0"] == 2
    assert (sums["overlap_0"], sums["change_0"], sums["tv_0"], sums["agreement_0"]) == (2, 0, 3, 2)
    assert (sums["body_overlap_0"], sums["body_change_0"], sums["body_tv_0"]) == (2, 0, 0)
    assert sums["excess_0"] == 0  # where α changed, the argmax had flipped


def test_sampled_sums_by_definition():
    p, q, variant, body = (laws(seed) for seed in range(4))
    sums = sampled_sums({"": variant, "body_": body}, q, p, "1")
    assert sums["base_overlap_1"] == pytest.approx(float(torch.minimum(p, q).sum()))
    for head, law in (("", variant), ("body_", body)):
        betas, before = torch.minimum(p, law).sum(dim=-1), torch.minimum(p, q).sum(dim=-1)
        distance = (q - law).abs().sum(dim=-1) / 2
        assert sums[f"{head}overlap_1"] == pytest.approx(float(betas.sum()))
        assert sums[f"{head}change_1"] == pytest.approx(float((betas - before).sum()))
        assert sums[f"{head}tv_1"] == pytest.approx(float(distance.sum()))
        assert sums[f"{head}agreement_1"] == float((law.argmax(-1) == p.argmax(-1)).sum())
        assert sums[f"{head}excess_1"] == pytest.approx(float(((betas - before).abs() - distance).max()))
        assert sums[f"{head}excess_1"] < 0


def test_a_self_draft_begins_at_an_acceptance_of_one():
    p, variant = laws(0), laws(1)
    same, equal = (sampled_sums({"": variant}, q, p, "1") for q in (p, p.clone()))
    assert same["base_overlap_1"] == 6.0
    assert all(same[key] == pytest.approx(value, abs=1e-6) for key, value in equal.items())


def unquantized(target, draft):
    return Unquantized(target, draft, "draft", None, [], None)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def test_judging_a_text(build, monkeypatch):
    """By one pass over the text for each model, a few positions at once, against laws computed position by position."""
    monkeypatch.setattr(quantized_alpha, "POSITIONS", 4)
    model = build()
    draft = nearby(model, 0.05)
    rounded = lowbit_copy(draft, Recipe(Grid(4)))
    bodies = Bodies.of(unquantized(model, draft), rounded)
    bodies.check(torch.tensor([3, 4, 5]))
    body = lowbit_copy(draft, Recipe(Grid(4), head=False)).model
    case = text(3)

    def law(other, temperature):
        rows = []
        for n in range(len(case.new_tokens)):
            with torch.inference_mode():
                logits = other(torch.cat([case.prompt, case.new_tokens[:n]])[None]).logits[0, -1]
            rows.append((logits / temperature).softmax(dim=-1))
        return torch.stack(rows)

    sums = judge("sampled", case, bodies, [0.7, 1.0])
    for temperature in (0.7, 1.0):
        p, q = law(model, temperature), law(draft, temperature)
        for head, other in (("", rounded.model), ("body_", body)):
            want = float(torch.minimum(p, law(other, temperature)).sum())
            assert sums[f"{head}overlap_{label(temperature)}"] == pytest.approx(want, abs=1e-4)
            betas, before = torch.minimum(p, law(other, temperature)).sum(dim=-1), torch.minimum(p, q).sum(dim=-1)
            excess = float(((betas - before).abs() - (q - law(other, temperature)).abs().sum(dim=-1) / 2).max())
            assert sums[f"{head}excess_{label(temperature)}"] == pytest.approx(excess, abs=1e-4)
        assert sums[f"base_overlap_{label(temperature)}"] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-4)
    want = float(law(rounded.model, 1.0).log()[range(9), case.new_tokens].sum())
    assert sums["log_likelihood"] == pytest.approx(want, rel=1e-4)

    sums = judge("greedy", case, bodies, [1.0])
    assert sums["overlap_0"] == float((law(rounded.model, 1.0).argmax(-1) == case.best).sum())
    assert sums["base_overlap_0"] == float((law(draft, 1.0).argmax(-1) == case.best).sum())
    alone = Bodies.of(unquantized(model, model), cast_copy(model, torch.float16))
    assert alone.draft is None
    itself = judge("greedy", case, alone, [1.0])
    assert itself["base_overlap_0"] == 9 and itself["base_log_likelihood"] == -3.5


def test_a_padded_draft_gives_what_only_it_knows_no_probability(target):
    wider, narrower = tiny_llama(vocab_size=V + 8), tiny_llama(vocab_size=V - 8)
    for draft in (wider, narrower):
        variant = Bodies.of(unquantized(target, draft), cast_copy(draft, torch.float16)).variant
        own, body = variant.logits(torch.ones(2, draft.config.hidden_size))
        assert own.shape == body.shape == (2, V)
    assert bool(own[:, V - 8 :].isneginf().all()) and bool(own[:, : V - 8].isfinite().all())


def test_a_model_that_does_more_to_its_logits_than_its_head_is_refused(target, monkeypatch):
    monkeypatch.setattr(target, "forward", lambda *a, **o: type("Out", (), {"logits": torch.zeros(1, 3, V)}))
    with pytest.raises(InputError, match=r"LlamaForCausalLM does more to its logits than its LM head; allowed: models"):
        Body(target, V).check(torch.tensor([3, 4, 5]))


def test_the_record_pools_texts_and_pairs_changes():
    texts = []
    for seed in range(12):
        p, q, variant = laws(seed), laws(seed + 50), laws(seed + 100)
        sums = sampled_sums({"": variant, "body_": q}, q, p, "1")
        greedy = greedy_sums({"": variant.argmax(-1), "body_": q.argmax(-1)}, q.argmax(-1), p.argmax(-1))
        likelihoods = {f"{head}log_likelihood": -6.0 for head in ("", "body_", "base_")}
        texts.append((greedy | likelihoods, sums | likelihoods))
    record = quantized_alpha.agreement_record([g for g, _ in texts], [s for _, s in texts], [1.0])
    assert record["prompts"] == 12 and record["temperatures"] == [0.0, 1.0]
    assert record["positions_0"] == record["positions_1"] == 72
    assert record["perplexity_greedy"] == record["body_perplexity_sampled"] == pytest.approx(math.e)
    for name in ("0", "1"):
        change = record[f"alpha_{name}"] - record[f"alpha_unquantized_{name}"]
        assert record[f"alpha_change_{name}"] == pytest.approx(change)
        assert record[f"alpha_change_{name}_lo"] <= change <= record[f"alpha_change_{name}_hi"]
        # With the head as it is, this variant is the draft itself.
        assert record[f"body_alpha_change_{name}"] == record[f"body_tv_{name}"] == 0
        assert record[f"body_alpha_change_{name}_hi"] == 0
        assert abs(change) <= record[f"tv_{name}"]
    few = quantized_alpha.agreement_record([g for g, _ in texts[:3]], [s for _, s in texts[:3]], [1.0])
    assert few["alpha_0_lo"] is None and few["alpha_0"] is not None


# The loop


def test_the_loop_beside_teacher_forcing():
    looped = [AcceptanceStats((Round(2, 2, 1, 2, (1.0, 0.5)), Round(2, 2, 2, 3, (0.9, 0.8)))) for _ in range(12)]
    judged = [{"overlap_1": 4.5, "positions_1": 5.0}] * 12
    record = quantized_loop.comparison_record(looped, judged, "1")
    assert (record["tested_1"], record["positions_1"]) == (48, 60)
    assert record["alpha_1"] == 0.75 and record["alpha_overlap_1"] == pytest.approx(0.8)
    assert record["matched_alpha_1"] == pytest.approx(0.9) and record["difference_1"] == pytest.approx(-0.1)
    assert record["difference_1_lo"] == pytest.approx(-0.1) == record["difference_1_hi"]
    assert quantized_loop.comparison_record([AcceptanceStats()], judged[:1], "1")["difference_1"] is None


def test_a_beginning():
    cut = quantized_loop.beginning(text(0, new=9), 4)
    assert torch.equal(cut.new_tokens, text(0).new_tokens[:4]) and torch.equal(cut.best, text(0).best[:4])


# What is loaded


@pytest.mark.parametrize(("draft", "name"), [("int8", "big"), ("bf16", "big"), ("lookup", "big"), ("small", "small")])
def test_a_pair_without_a_model_of_its_own_drafts_with_the_target(monkeypatch, draft, name):
    from specdec.drafters import ModelDrafter, PromptLookupDrafter

    big, small = tiny_llama(), tiny_llama(1)
    asked = []

    class Pair:
        target = "big"

        def model_copy(self, update):
            return update["draft"]

    def load(pair, models, **options):
        asked.append(pair)
        drafter = ModelDrafter(small) if pair is spec else PromptLookupDrafter()
        return type("Loaded", (), {"target": big, "drafter": drafter, "tokenizer": None, "end_tokens": [7]})

    spec = Pair()
    spec.draft = draft
    monkeypatch.setattr(variants, "pair_spec", lambda params, pair: spec)
    monkeypatch.setattr(variants, "load_pair", load)
    params = type("Params", (), {"models": {}})
    found = variants.load_unquantized(params, "pair", torch.device("cpu"), torch.float32)
    assert found.draft_name == name and found.target is big and found.draft is (small if name == "small" else big)
    assert asked == [spec if name == "small" else "lookup"]  # which loads nothing but the target


def test_every_script_names_its_options(capsys, monkeypatch):
    for script in (quantized_alpha, quantized_loop, quantized_benchmark, contexts):
        monkeypatch.setattr("sys.argv", ["x.py", "--help"])
        with pytest.raises(SystemExit) as end:
            script.main()
        assert end.value.code == 0 and "--pair" in capsys.readouterr().out
