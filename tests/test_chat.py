"""Who wrote which token, with colours and without, whole characters only."""

import gc
import io
import weakref

import pytest
import torch
from stand_ins import disagreeing, nearby, tiny_gpt2, tiny_llama

from pipeline import chat
from pipeline.chat import RoundPrinter, summary
from pipeline.weights import LoadedPair
from specdec.drafters import ModelDrafter
from specdec.generate import GenerationResult, RoundTokens, autoregressive_generate
from specdec.llama import LlamaDecoder
from specdec.stats import AcceptanceStats, Round

GREEN, RED, BLUE, RESET = "\033[32m", "\033[31m", "\033[34m", "\033[0m"
END = 256


class Bytes:
    """A tokenizer with one token a byte, as every byte-level one has, and an end token."""

    def decode(self, tokens, skip_special_tokens=False):
        assert skip_special_tokens
        return bytes(token for token in tokens if token != END).decode("utf-8", errors="replace")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)


def round_of(*pairs):
    """Pairs of a text, or of raw tokens, and the kind of each of their tokens."""
    tokens, kinds = [], []
    for text, kind in pairs:
        some = list(text.encode()) if isinstance(text, str) else text
        tokens += some
        kinds += [kind] * len(some)
    return RoundTokens(tuple(tokens), tuple(kinds), Round(0, 0, 0, 0, ()))


def printed(*rounds, stream=None, end=True):
    stream = stream or io.StringIO()
    printer = RoundPrinter(Bytes(), stream)
    for round_tokens in rounds:
        printer.on_round(round_tokens)
    if end:
        printer.end()
    return stream.getvalue()


ROUNDS = (round_of(("ab", "accepted"), ("c", "corrected")), round_of(("d", "accepted"), ("e", "bonus")))


def test_without_a_terminal_the_targets_own_tokens_are_marked():
    assert printed(*ROUNDS) == "ab[c]d{e}\n"


def test_on_a_terminal_every_kind_has_its_colour():
    assert printed(*ROUNDS, stream=Terminal()) == (
        f"{GREEN}a{RESET}{GREEN}b{RESET}{RED}c{RESET}{GREEN}d{RESET}{BLUE}e{RESET}\n"
    )


def test_who_wants_no_colour_gets_marks_on_a_terminal_too(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(*ROUNDS, stream=Terminal()) == "ab[c]d{e}\n"


def test_an_empty_no_color_is_no_wish(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "")
    assert printed(*ROUNDS, stream=Terminal()).startswith(GREEN)


def test_each_round_is_shown_when_it_ends():
    class Slow(io.StringIO):
        shown = ""

        def flush(self):
            self.shown = self.getvalue()

    stream = Slow()
    printer = RoundPrinter(Bytes(), stream)
    printer.on_round(ROUNDS[0])
    assert stream.shown == "ab[c]"


@pytest.mark.parametrize("character", ["é", "€", "🙂"])
def test_a_character_is_shown_whole_in_the_style_of_the_token_that_ends_it(character):
    *start, last = character.encode()
    assert printed(round_of((start, "accepted"), ([last], "corrected"))) == f"[{character}]\n"
    # Its tokens may come from several rounds, too; what stands before and after is not held back.
    assert printed(round_of(("x", "accepted"), (start, "bonus")), end=False) == "x"
    rounds = round_of(("x", "accepted"), (start, "bonus")), round_of(([last], "accepted"), ("y", "bonus"))
    assert printed(*rounds) == f"x{character}{{y}}\n"


def test_half_a_character_at_the_very_end_is_not_lost():
    assert printed(round_of(("x", "accepted"), ("🙂".encode()[:2], "bonus"))) == "x\N{REPLACEMENT CHARACTER}\n"


def test_bytes_that_are_no_character_hold_nothing_back():
    text = printed(round_of((b"\xf0\x9f", "accepted"), ("ab", "accepted")), end=False)
    assert text == "\N{REPLACEMENT CHARACTER}ab"


@pytest.mark.parametrize("kind", ["accepted", "corrected", "bonus"])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_an_end_token_shows_nothing(kind, stream):
    assert printed(round_of(([END], kind)), stream=stream()) == "\n"


LEGEND = "accepted  [corrected]  {bonus}\n\n"


def test_the_legend_is_written_in_its_own_styles():
    assert RoundPrinter(Bytes(), io.StringIO()).legend == "accepted  [corrected]  {bonus}"
    assert RoundPrinter(Bytes(), Terminal()).legend == (
        f"{GREEN}accepted{RESET}  {RED}corrected{RESET}  {BLUE}bonus{RESET}"
    )


def result_of(*rounds, finish_reason="length"):
    return GenerationResult(torch.zeros(1, 1), (), AcceptanceStats(rounds), finish_reason)


def test_the_summary_tells_the_two_rates_apart():
    text = summary(result_of(Round(4, 4, 1, 2, (1.0, 0.5)), Round(2, 2, 2, 3, (1.0, 1.0)), finish_reason="eos"))
    assert text.splitlines() == [
        "",
        "5 tokens in 2 target forwards: 2.500 tokens per round",
        "alpha (accepted / tested) 0.750, acceptance rate (accepted / proposed) 0.500, ended by eos",
    ]


def test_what_is_undefined_is_a_dash():
    plain = summary(result_of(Round(0, 0, 0, 1, ())))
    assert "1.000 tokens per round" in plain
    assert "alpha (accepted / tested) –, acceptance rate (accepted / proposed) –, ended by length" in plain
    assert ": – tokens per round" in summary(result_of())


@pytest.mark.parametrize("kernels", ["default", "joined"])
def test_target_and_draft_run_on_the_kernels(monkeypatch, kernels):
    target, seen = tiny_llama(vocab_size=128), {}

    def generate(target, prompt, **options):
        seen.update(target=target, draft=options["drafter"].model)
        return result_of(Round(0, 0, 0, 1, ()))

    loaded = LoadedPair(target, ModelDrafter(nearby(target, 0.3)), 0, Bytes(), [], None, None)
    monkeypatch.setattr(chat, "load_pair", lambda *arguments, **options: loaded)
    monkeypatch.setattr(chat, "encode_conversation", lambda *_: torch.tensor([[72]]))
    monkeypatch.setattr(chat, "speculative_generate", generate)
    monkeypatch.setattr("sys.argv", ["chat.py", "Hi", "--device", "cpu", "--kernels", kernels])
    chat.main()
    assert [isinstance(model, LlamaDecoder) for model in seen.values()] == [kernels == "joined"] * 2


@pytest.mark.parametrize("kernels", ["default", "joined", "packed"])
def test_models_that_no_longer_decode_are_out_of_memory_while_others_do(monkeypatch, kernels):
    """So that the matrices that other kernels copy lie there once."""
    models = []

    def load(*arguments, **options):
        target = tiny_llama(vocab_size=128)
        draft = nearby(target, 0.3)
        models.extend(map(weakref.ref, (target, draft)))
        return LoadedPair(target, ModelDrafter(draft), 0, Bytes(), [], None, None)

    def generate(target, prompt, **options):
        gc.collect()
        assert [model() is not None for model in models] == [kernels == "default"] * 2
        return result_of(Round(0, 0, 0, 1, ()))

    monkeypatch.setattr(chat, "load_pair", load)
    monkeypatch.setattr(chat, "encode_conversation", lambda *_: torch.tensor([[72]]))
    monkeypatch.setattr(chat, "speculative_generate", generate)
    monkeypatch.setattr("sys.argv", ["chat.py", "Hi", "--device", "cpu", "--kernels", kernels])
    chat.main()
    assert len(models) == 2


def test_the_command_shows_the_text_that_plain_decoding_gives(monkeypatch, capsys):
    target = tiny_gpt2(vocabulary=128)
    prompt = torch.tensor([[72, 105]])

    class Loader:
        draft = nearby(target, 0.3)

        def __call__(self, pair, models, *, device, dtype, confidence_threshold):
            self.asked = (pair.target, pair.draft, str(device), dtype, confidence_threshold)
            return LoadedPair(target, ModelDrafter(self.draft), 0, Bytes(), [], None, None)

    load = Loader()
    monkeypatch.setattr(chat, "load_pair", load)
    monkeypatch.setattr(chat, "encode_conversation", lambda tokenizer, turns, answers: {("Hi",): prompt}[(*turns,)])

    def shown(draft, *options):
        load.draft = draft
        command = ["chat.py", "Hi", "--target", "some", "--draft", "other", "--max-new-tokens", "12", "--device", "cpu"]
        monkeypatch.setattr("sys.argv", [*command, *options])
        chat.main()
        return capsys.readouterr().out

    def text(**options):
        return Bytes().decode(autoregressive_generate(target, prompt, **options).new_tokens, skip_special_tokens=True)

    greedy = text(max_new_tokens=12)
    marked = {"corrected": "".join(f"[{c}]" for c in greedy), "accepted": greedy}
    first = f"{LEGEND}{marked['accepted'][:11]}{{{greedy[11]}}}\n\n12 tokens in"
    assert shown(target, "--k", "11").startswith(first), "what the marks mean stands above them"
    assert load.asked == ("some", "other", "cpu", torch.float32, 0.0)
    shown(target, "--device", "spread")
    assert load.asked[2] == "spread"
    out = shown(disagreeing(target), "--k", "2")
    assert out.startswith(LEGEND + marked["corrected"][: -len("[x]")])
    assert "12 tokens in 12 target forwards: 1.000 tokens per round" in out
    assert "alpha (accepted / tested) 0.000" in out
    one, same, other = (shown(load.draft, "--temperature", "1.5", "--seed", seed) for seed in ("1", "1", "2"))
    assert one == same != other
    assert shown(load.draft, "--temperature", "1.5", "--seed", "1", "--verifier", "block") != one
    assert shown(target, "--temperature", "1.5", "--top-k", "1") == shown(target)
    assert shown(target, "--kernels", "packed") == shown(target)
    assert shown(target, "--temperature", "1.5", "--top-p", "1e-6") == shown(target)
