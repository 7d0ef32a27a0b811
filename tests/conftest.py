"""What all tests share. Everything runs offline, on the CPU and on one thread, as the results of two runs may differ else."""

import os

import laws
import pytest
import torch
import transformers

# Each takes minutes. They are begun first: at the end one of them would keep one process busy and the others idle.
SLOWEST = ("test_pipeline.py", "test_hub_pipeline.py", "test_quantized_readout.py", "test_exact_laws.py")


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist's own order, by the number of tests


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """What is written here need not outlive a power cut, and some tests write a study of files; stages in processes do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def toy_pair():
    """Target and draft that the toy cells measure."""
    from specdec.models import toy_draft, toy_target

    return toy_target(0), toy_draft(0)


# The tests run in several processes: each sends the deviations of its exact laws to the one that prints the summary.


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deviations"] = laws.DEVIATIONS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    laws.DEVIATIONS += getattr(node, "workeroutput", {}).get("deviations", [])


def pytest_terminal_summary(terminalreporter):
    if laws.DEVIATIONS:
        terminalreporter.write_line(
            f"exact laws: {len(laws.DEVIATIONS)} enumerated, largest deviation {max(laws.DEVIATIONS):.0e}"
        )
