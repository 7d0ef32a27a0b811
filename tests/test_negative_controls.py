"""Negative controls: wrong variants of the library, each of them noticed by the comparison of test_exact_laws.py.

A check that finds nothing is worth what it would have found. So each control makes one mistake in the production source, where
a person would make it, runs the whole loop on the changed code, and states how far the law of the text is then from the
target's: the total variation distance over all texts of `length` new tokens. `python tests/test_negative_controls.py` prints
the table.
"""

import inspect
import re
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from laws import EnumeratingChooser, OneUniform, TestReused, law_of_texts, law_of_the_loop, total_variation
from stand_ins import ScriptedModel, random_table
from torch import Tensor

from specdec import drafters, generate, verify


@dataclass(frozen=True)
class Setting:
    """Which texts are compared: the tables of target and draft, the prompt, k, and the number of new tokens."""

    p: Tensor
    q: Tensor | None  # None: prompt lookup
    prompt: tuple[int, ...] = (2, 1)
    k: int = 2
    length: int = 3


def everywhere(*law: float) -> Tensor:
    return torch.tensor(law, dtype=torch.float64).expand(len(law), len(law), -1)


P, Q = (random_table(3, seed, dtype=torch.float64) for seed in (0, 1))
TABLES = Setting(P, Q)
TWO = Setting(everywhere(1 / 3, 2 / 3), everywhere(2 / 3, 1 / 3), (0, 1))  # the example of Sun et al. 2024
MORE_ROUNDS = Setting(P, Q, k=1, length=4)
ZERO = Setting(everywhere(0.6, 0.4, 0.0), everywhere(0.2, 0.3, 0.5))
HALF_EQUAL = Setting(P, torch.where(torch.arange(3)[:, None, None] == 1, P, Q), k=3, length=4)
LOOKUP = Setting(P, None, (1, 2, 1, 1, 2))


def mutated(module: ModuleType, changes: dict[str, str]) -> ModuleType:
    """A copy of the module in which each snippet, there exactly once, is replaced. The module itself stays as it is."""
    source = inspect.getsource(module)
    for old, new in changes.items():
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
        source = source.replace(old, new)
    copy = ModuleType(module.__name__)
    exec(compile(source, f"<mutated {module.__name__}>", "exec"), vars(copy))
    return copy


@dataclass(frozen=True)
class Control:
    """A mistake, and the total variation distance that it causes, to three digits."""

    name: str
    distance: float
    module: ModuleType = verify
    changes: dict[str, str] = field(default_factory=dict)
    setting: Setting = TABLES
    rule: str = "token"
    threshold: float = 0.0
    options: dict = field(default_factory=dict)
    chooser: type[EnumeratingChooser] = EnumeratingChooser

    def measured(self) -> float:
        changed, setting = mutated(self.module, self.changes), self.setting
        modules = {module.__name__: module for module in (drafters, generate, verify)} | {changed.__name__: changed}
        kinds, loop, rules = modules.values()
        target, draft = ScriptedModel(setting.p), ScriptedModel(setting.q)
        drafter = kinds.PromptLookupDrafter() if setting.q is None else kinds.ModelDrafter(draft, self.threshold)
        options = {"temperature": 1.0} | self.options
        end = options.pop("end", None)
        texts = {"prompt": setting.prompt, "length": setting.length}
        loop_options = options | {"verify": rules.VERIFIERS[self.rule], "eos_token_id": end, "chooser": self.chooser}
        law = law_of_the_loop(target, drafter, k=setting.k, module=loop, **texts, **loop_options)
        return total_variation(law, law_of_texts(setting.p, end=end, **texts, **options))


# The places of the mistakes

EXCESS = "excess = (scale * p - q).clamp_min(0)"
RATIO = "return scale * p_x / q_x"
TEST = "if not chooser.bernoulli(min(1.0, ratio)):"
CORRECTED = "return Verdict(j, chooser.categorical(residual(p[j], q_j)), False, tuple(overlaps))"
BONUS = "return Verdict(len(draft_tokens), chooser.categorical(p[-1]), True, tuple(overlaps))"
BLOCK = "joint, acceptance = block_acceptance(draft_tokens, p, q)"
BLOCK_LAST = "            accepted = length\n"
BLOCK_JOINT = "joint.append(min(1.0, _ratio(token, p[j], _draft_law(draft_tokens, p, q, j), j, scale=joint[-1])))"
BLOCK_TEST = "acceptance.append(1.0 if joint[i] == 1 else surplus / (surplus + (1 - joint[i])))"
BLOCK_ARGUMENTS = "def block_acceptance(draft_tokens: Sequence[int], p: Tensor, q: Tensor | None)"
DRAWN = "tokens.append(chooser.categorical(q))"
KEPT = "probs.append(q)"
STOP = "                break\n"
DRAFT = "return Draft(tuple(tokens), torch.stack(probs) if probs else None)"
DRAFT_LAW = "q = to_probs(logits[0], self._sampling).cpu()"
TARGET_LAW = "p = to_probs(cached.forward(unread), sampling).cpu()"
ROLLBACK = "        cached.rollback(length - 1)"

COOL, TOP_2, END = {"temperature": 0.6}, {"top_k": 2}, {"end": 2}


class OneSeedForTests(OneUniform):
    reseeded = ("test",)


class OneSeedForDraws(OneUniform):
    reseeded = ("draw",)


CONTROLS = [
    # The corrected token
    Control("corrected token drawn from p", 0.104, verify, {EXCESS: "excess = p"}),
    Control("corrected token drawn from p, block verification", 0.0956, verify, {EXCESS: "excess = p"}, rule="block"),
    Control("residual |p − q|, without the positive part", 0.136, verify, {EXCESS: "excess = (scale * p - q).abs()"}),
    Control(
        "corrected token drawn from p without the rejected one",
        0.0631,
        verify,
        {CORRECTED: CORRECTED.replace("residual(p[j], q_j)", "p[j].index_fill(0, torch.tensor(token), 0)")},
    ),
    Control(
        "corrected token from the next position's residual",
        0.208,
        verify,
        {CORRECTED: CORRECTED.replace("p[j]", "p[j + 1]")},
    ),
    Control(
        "rejected token emitted beside the corrected one",
        0.298,
        verify,
        {CORRECTED: CORRECTED.replace("Verdict(j,", "Verdict(j + 1,")},
    ),
    Control(
        "prompt lookup: corrected token drawn from p",
        0.236,
        verify,
        {CORRECTED: CORRECTED.replace("residual(p[j], q_j)", "p[j] if q is None else residual(p[j], q_j)")},
        LOOKUP,
    ),
    # The test
    Control("ratio upside down", 0.26, verify, {RATIO: "return scale * q_x / p_x"}),
    Control("accepted with probability p, as if samples were matched", 0.365, verify, {RATIO: "return scale * p_x"}),
    Control("lenience 1/2: accepted with 2p / q", 0.188, verify, {RATIO: "return 2 * scale * p_x / q_x"}),
    Control(
        "u <= p / q where p = 0, u having 24 bits",
        5.96e-8,
        verify,
        {RATIO: "return max(scale * p_x / q_x, 2**-24)"},
        ZERO,
    ),
    Control("everything accepted", 0.265, verify, {TEST: "if False:"}),
    Control(
        "typical acceptance (Medusa): p above a threshold",
        0.224,
        verify,
        {TEST: "if p[j][token] <= min(0.3, 0.3 * float(torch.exp(-torch.special.entr(p[j]).sum()))):"},
    ),
    Control(
        "a failed test tried once more",
        0.129,
        verify,
        {TEST: "if not (chooser.bernoulli(min(1.0, ratio)) or chooser.bernoulli(min(1.0, ratio))):"},
    ),
    # The second attempt by itself has the law p, so this is the first mistake of the list in disguise.
    Control(
        "a second draft token tried in place of the rejected one",
        0.104,
        verify,
        {
            CORRECTED: "second = chooser.categorical(q_j)\n"
            "            passes = chooser.bernoulli(min(1.0, _ratio(second, p[j], q_j, j)))\n"
            "            token = second if passes else chooser.categorical(residual(p[j], q_j))\n"
            "            return Verdict(j, token, False, tuple(overlaps))"
        },
    ),
    Control(
        "ratio of the next position's law",
        0.23,
        verify,
        {"ratio = _ratio(token, p[j], q_j, j)": "ratio = _ratio(token, p[j + 1], q_j, j)"},
    ),
    Control(
        "a failed test does not end the round",
        0.222,
        verify,
        {BLOCK: "joint, acceptance = [1.0] * (len(draft_tokens) + 1), token_acceptance(draft_tokens, p, q)"},
        TWO,
        rule="block",
    ),
    # The bonus token
    Control("bonus token drawn from q", 0.187, verify, {BONUS: BONUS.replace("p[-1]", "(p if q is None else q)[-1]")}),
    Control("bonus token drawn from the law before", 0.158, verify, {BONUS: BONUS.replace("p[-1]", "p[-2:][0]")}),
    Control(
        "bonus token the likeliest one",
        0.556,
        verify,
        {BONUS: BONUS.replace("chooser.categorical(p[-1])", "int(p[-1].argmax())")},
    ),
    Control(
        "bonus token without the temperature",
        0.0626,
        generate,
        {
            TARGET_LAW: "logits = cached.forward(unread)\n"
            "        p = to_probs(logits, sampling)\n"
            "        p[-1] = to_probs(logits[-1], SamplingConfig(1.0))"
        },
        options=COOL,
    ),
    # Block verification
    Control(
        "block: the first failed test ends the round",
        0.333,
        verify,
        {BLOCK_LAST: f"{BLOCK_LAST}        else:\n            break\n"},
        TWO,
        rule="block",
    ),
    # A G-test of three tokens would need 2.7 million texts to notice this one with probability 0.99.
    Control(
        "block: residual without the scale",
        0.000742,
        verify,
        {"accepted), joint[accepted])": "accepted))"},
        rule="block",
    ),
    Control(
        "block: surplus without the scale", 0.133, verify, {"float((joint[i] * p[i]": "float((p[i]"}, TWO, rule="block"
    ),
    Control(
        "block: product of capped ratios",
        0.111,
        verify,
        {BLOCK_JOINT: "joint.append(joint[-1] * min(1.0, _ratio(token, p[j], _draft_law(draft_tokens, p, q, j), j)))"},
        TWO,
        rule="block",
    ),
    Control(
        "block: every prefix tested with its joint probability",
        0.167,
        verify,
        {BLOCK_TEST: "acceptance.append(joint[i])"},
        TWO,
        rule="block",
    ),
    Control(
        "block: scale carried over into the next round",
        0.0202,
        verify,
        {
            BLOCK_ARGUMENTS: "def block_acceptance(draft_tokens, p, q, start=1.0)",
            "joint = [1.0]": "joint = [start]",
            BLOCK: BLOCK.replace("q)", "q, getattr(chooser, 'scale', 1.0))"),
            BLOCK_LAST: f"{BLOCK_LAST}    chooser.scale = joint[accepted]\n",
        },
        MORE_ROUNDS,
        rule="block",
    ),
    # What the draft is drawn from
    Control(
        "q not the law drawn from: likeliest token, laws of sampling",
        0.766,
        drafters,
        {DRAWN: "tokens.append(int(q.argmax()))"},
    ),
    Control(
        "q not the law drawn from: the likelier of two draws",
        0.301,
        drafters,
        {
            DRAWN: "tokens.append(max(chooser.categorical(q), chooser.categorical(q), key=lambda token: float(q[token])))"
        },
    ),
    Control(
        "q not the law drawn from: without its filter",
        0.26,
        drafters,
        {KEPT: "probs.append(to_probs(logits[0], SamplingConfig(self._sampling.temperature)))"},
        options=TOP_2,
    ),
    Control(
        "q not the law drawn from: without its temperature",
        0.0613,
        drafters,
        {KEPT: "probs.append(to_probs(logits[0], SamplingConfig(1.0)))"},
        options=COOL,
    ),
    Control(
        "confidence stop that drops the unlikely token",
        0.25,
        drafters,
        {STOP: f"                tokens.pop(), probs.pop()\n{STOP}"},
        threshold=0.35,
    ),
    # What the target says
    Control(
        "temperature only in the draft's laws",
        0.137,
        generate,
        {TARGET_LAW: TARGET_LAW.replace("sampling)", "SamplingConfig(1.0))")},
        options=COOL,
    ),
    Control(
        "top-k only in the draft's laws",
        0.438,
        generate,
        {TARGET_LAW: TARGET_LAW.replace("sampling)", "SamplingConfig(sampling.temperature))")},
        options=TOP_2,
    ),
    Control(
        "prompt fed one token off", 0.308, generate, {"forward(prompt[:-1], keep=1)": "forward(prompt[1:], keep=1)"}
    ),
    Control(
        "cache that keeps one token too many",
        0.0173,
        generate,
        {ROLLBACK: "        cached.rollback(min(length, cached.length))"},
    ),
    Control("cache that keeps one token too few", 0.0354, generate, {ROLLBACK: "        cached.rollback(length - 2)"}),
    Control(
        "draft goes on behind an end token",
        0.435,
        generate,
        {"if end is not None and verdict.accepted >= end:": "if False:"},
        options=END,
    ),
    # The random numbers
    Control("one seed for everything", 0.713, chooser=OneUniform),
    Control("one seed for every test", 0.0516, chooser=OneSeedForTests),
    Control("one seed for every draw of a token", 0.591, chooser=OneSeedForDraws),
    Control("a test's number used for the corrected token too", 0.133, chooser=TestReused),
]

HARMLESS = [
    # `categorical` normalises.
    Control("residual not normalised", 0, verify, {EXCESS: "return (scale * p - q).clamp_min(0)"}),
    # Then the next joint probability is 1 too, and so on to the last test, which passes: 0 / 0 may be anything but NaN.
    Control(
        "block: 0 / 0 taken as 0",
        0,
        verify,
        {BLOCK_TEST: BLOCK_TEST.replace("1.0 if", "0.0 if surplus == 0 else 1.0 if")},
        HALF_EQUAL,
        rule="block",
    ),
    # Accepted with p(x), else drawn from p without x: that is right for each x, wherever x comes from. It accepts less.
    Control("sampled token taken as certain", 0, drafters, {DRAFT: "return Draft(tuple(tokens), None)"}),
    # Any draft will do whose law is handed over. These accept less.
    Control(
        "another temperature for the draft",
        0,
        drafters,
        {DRAFT_LAW: DRAFT_LAW.replace("self._sampling", "SamplingConfig(2.0)")},
    ),
    Control(
        "prompt fed to the draft one token off",
        0,
        drafters,
        {"forward(prompt[:-1], keep=1)": "forward(prompt[1:], keep=1)"},
    ),
]


def of_name(control: Control) -> str:
    return control.name


@pytest.mark.parametrize("control", CONTROLS, ids=of_name)
def test_f02_a_wrong_variant_is_noticed(control):
    assert control.distance > 1e-9
    assert control.measured() == pytest.approx(control.distance, rel=5e-3)


@pytest.mark.parametrize("control", HARMLESS, ids=of_name)
def test_a_harmless_variant_is_found_harmless(control):
    assert control.measured() < 1e-12


def test_f02_without_a_mistake_the_distance_is_0_in_every_setting():
    unchanged = {(id(c.setting), c.rule, c.threshold, *c.options.items()): c for c in CONTROLS + HARMLESS}.values()
    for c in unchanged:
        assert Control("", 0, verify, {}, c.setting, c.rule, c.threshold, c.options).measured() < 1e-12


def test_f02_there_are_enough_controls_and_none_twice():
    assert len({control.name for control in CONTROLS}) == len(CONTROLS) >= 35


def test_a_probability_above_1_is_refused():
    uncapped = {BLOCK_JOINT: BLOCK_JOINT.replace("min(1.0, ", "(")}
    with pytest.raises(ValueError, match="are no probabilities"):
        Control("block: joint probability not capped", 1, verify, uncapped, TWO, "block").measured()


def test_a_snippet_that_is_not_there_is_refused():
    with pytest.raises(AssertionError, match="stands 0 times in"):
        mutated(verify, {"no such line": ""})


def print_tables(controls, harmless):
    print("| Mistake | Total variation distance |\n|---|---|")
    for each in controls:
        print(f"| {each.name.replace('|', chr(92) + '|')} | {each.measured():.3g} |", flush=True)
    print("\n| Harmless variant | Total variation distance |\n|---|---|")
    for each in harmless:
        print(f"| {each.name} | {'below 1e-12' if each.measured() < 1e-12 else 'NOT HARMLESS'} |", flush=True)


def test_the_command_prints_both_tables(capsys):
    first, second = CONTROLS[:2]
    print_tables([first], [HARMLESS[0], second])
    rows = re.findall(r"(?m)^\| (.+) \| (.+) \|$", capsys.readouterr().out)
    assert rows == [
        ("Mistake", "Total variation distance"),
        (first.name, f"{first.measured():.3g}"),
        ("Harmless variant", "Total variation distance"),
        (HARMLESS[0].name, "below 1e-12"),
        (second.name, "NOT HARMLESS"),
    ]


if __name__ == "__main__":
    print_tables(CONTROLS, HARMLESS)
