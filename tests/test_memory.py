"""A model that does not fit is refused before anything of it is read, in one sentence that says what would fit."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from stand_ins import tiny_gpt2, tiny_llama
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from specdec import memory
from specdec.errors import InputError
from specdec.memory import SPREAD, free_memory, require_memory
from specdec.models import count_parameters, load_model

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


# What fits


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)], ids=str)
def test_exactly_as_much_as_is_free_fits_and_one_byte_less_does_not(dtype, size):
    require_memory("It", 1000, dtype, CPU, free=1000 * size)
    with pytest.raises(InputError, match=f"It has 1,000 parameters of {size} bytes"):
        require_memory("It", 1000, dtype, CPU, free=1000 * size - 1)


def refusal(*arguments, **options):
    with pytest.raises(InputError) as caught:
        require_memory(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_sentence_names_the_dtypes_that_would_fit():
    assert refusal("The model models/big", 3_000_000_000, torch.float32, CPU, free=8_000_000_000) == (
        "The model models/big has 3,000,000,000 parameters of 4 bytes, which is 12.00 GB in float32, with 8.00 GB free on cpu; "
        "what would help: bfloat16 or float16 (6.00 GB); closing other programs; or another device."
    )


def test_where_no_dtype_fits_it_says_how_large_a_model_may_be_in_each():
    assert refusal("The model models/huge", 7_000_000_001, torch.bfloat16, CPU, free=8_000_000_001) == (
        "The model models/huge has 7,000,000,001 parameters of 2 bytes, which is 14.00 GB in bfloat16, with 8.00 GB free on cpu; "
        "what would help: at most so many parameters: 2,000,000,000 in float32, 4,000,000,000 in bfloat16, 4,000,000,000 in "
        "float16; closing other programs; or another device."
    )


@pytest.mark.parametrize(
    ("device", "place", "elsewhere"),
    [
        (torch.device("cuda", 1), "cuda:1", "the device cpu or spread"),
        (MPS, "mps", "the device cpu"),
        (SPREAD, "all GPUs and in main memory", "a machine with more memory"),
    ],
    ids=str,
)
def test_the_sentence_names_the_device_and_where_else_there_may_be_room(device, place, elsewhere):
    sentence = refusal("It", 10, torch.float32, device, free=30)
    assert f"free on {place}; what would help: bfloat16 or float16" in sentence
    assert sentence.endswith(f"closing other programs; or {elsewhere}.")


# What is free


@pytest.fixture
def no_cgroups(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_OWN_CGROUP", tmp_path / "none")


def virtual_memory(monkeypatch, **fields):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(**fields))


def test_free_on_this_machine_is_some_and_at_most_all():
    assert 0 < free_memory(CPU) <= psutil.virtual_memory().total


def test_free_on_linux_and_windows_is_what_the_system_calls_available(monkeypatch, no_cgroups):
    virtual_memory(monkeypatch, total=100, available=60)
    assert free_memory(CPU) == 60


def test_free_on_macos_is_what_is_not_wired(monkeypatch, no_cgroups):
    virtual_memory(monkeypatch, total=100, available=10, wired=30)
    assert free_memory(CPU) == 70


def cgroup(folder, limit, used, **cached):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = {"anon": 7, "active_file": 0, "inactive_file": 0} | cached
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


@pytest.fixture
def cgroups(monkeypatch, tmp_path):
    virtual_memory(monkeypatch, total=1000, available=600)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path / "cgroup"


def test_a_containers_limit_leaves_what_is_not_used_and_what_files_hold(cgroups):
    assert free_memory(CPU) == 600  # no group at all
    cgroup(cgroups, 500, 300, active_file=20, inactive_file=100)
    assert free_memory(CPU) == 320
    cgroup(cgroups, 900, 100)
    assert free_memory(CPU) == 600  # the machine itself has less
    cgroup(cgroups, 200, 210)
    assert free_memory(CPU) == 0
    cgroup(cgroups, "max", 300)
    assert free_memory(CPU) == 600


def test_of_nested_groups_the_narrowest_limit_holds(cgroups, tmp_path):
    (tmp_path / "own").write_text("1:cpu:/elsewhere\n0::/slurm/job/step\n")
    cgroup(cgroups / "slurm" / "job" / "step", "max", 50)
    cgroup(cgroups / "slurm" / "job", 400, 50)
    cgroup(cgroups / "slurm", 800, 300)
    assert free_memory(CPU) == 350
    cgroup(cgroups / "slurm", 350, 300)
    assert free_memory(CPU) == 50


def gpus(monkeypatch, *free, unused=0):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index or 0], 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: unused + 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)


def test_free_on_a_gpu_is_the_drivers_and_what_torch_keeps_unused(monkeypatch):
    gpus(monkeypatch, 400, 300, unused=11)
    assert free_memory(CUDA) == 411 and free_memory(torch.device("cuda", 1)) == 311


def test_free_on_mps_is_what_the_system_recommends_at_most(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 700)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 200)
    assert free_memory(MPS) == 500


def test_a_spread_model_may_take_all_gpus_and_main_memory_together(monkeypatch, no_cgroups):
    virtual_memory(monkeypatch, total=1000, available=100)
    gpus(monkeypatch, 400, 300)
    require_memory("It", 200, torch.float32, SPREAD)
    with pytest.raises(InputError, match="201 parameters"):
        require_memory("It", 201, torch.float32, SPREAD)


# Before loading


@pytest.fixture
def room(monkeypatch):
    """Sets the free bytes, and fails if any weight is read."""

    def set_room(free):
        monkeypatch.setattr(memory, "free_memory", lambda device: free)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return set_room


@pytest.mark.parametrize("device", [CPU, SPREAD], ids=str)
@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_a_model_that_does_not_fit_is_refused_and_its_weights_are_never_read(
    tmp_path, monkeypatch, room, build, device
):
    model = build()
    model.save_pretrained(tmp_path / "model")
    parameters = count_parameters(model)  # GPT-2's head is tied
    room(4 * parameters)
    load_model(tmp_path / "model", dtype=torch.float32, device=device)
    room(4 * parameters - 1)
    load_model(tmp_path / "model", dtype=torch.bfloat16, device=device)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read"))
    message = rf"^The model .*model has {parameters:,} parameters of 4 bytes, .* in float32.*what would help: bfloat16 or float16"
    with pytest.raises(InputError, match=message):
        load_model(tmp_path / "model", dtype=torch.float32, device=device)


def test_a_tied_head_needs_its_room_once(tmp_path, room):
    config = tiny_gpt2().config
    sizes = {}
    for tied in (True, False):
        config.tie_word_embeddings = tied
        with torch.random.fork_rng(devices=[]):
            model = GPT2LMHeadModel(config)
        model.save_pretrained(tmp_path / str(tied))
        sizes[tied] = count_parameters(model)
    assert sizes[False] - sizes[True] == 40 * 16
    room(4 * sizes[True])
    load_model(tmp_path / "True", dtype=torch.float32, device=CPU)
    with pytest.raises(InputError, match=f"{sizes[False]:,} parameters"):
        load_model(tmp_path / "False", dtype=torch.float32, device=CPU)


def test_a_configuration_that_builds_no_model_gets_the_loaders_own_sentence(tmp_path, room):
    tiny_gpt2().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "unheard of"}')
    room(0)
    with pytest.raises(InputError, match="cannot be loaded as a causal language model"):
        load_model(tmp_path / "model", dtype=torch.float32, device=CPU)
