"""Settings every test runs under: no hub, no chatter, one thread."""

import gc
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # servers inside the process obey it too
os.environ["GOMP_SPINCOUNT"] = "1000"  # a command that a test calls in this process sets it for all later tests
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["SWARM_CONFIG"] = "none"  # not the user's own

import swarm_protocol  # noqa: F401  (sets grpc up before anything imports it)
from swarm_protocol.process.signals import HANGUP

TESTS = Path(__file__).parent
END_TO_END = ("swarm", "attack", "training")  # folders whose tests start servers or peers

# Processes would inherit that a signal is ignored, as in the background of a shell or under nohup.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if HANGUP is not None and signal.getsignal(HANGUP) is signal.SIG_IGN:
    signal.signal(HANGUP, signal.SIG_DFL)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what all tests need: not in the process that only hands them out, which the others would wait for."""
    if session.config.getoption("dist", "no") != "no":
        return
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def own_data_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gateways keep their histories there, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """A command that a test calls in this process sets them; Ctrl-C of a later test would end the whole process."""
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None]
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    """End-to-end tests are slow tests, but for those that stand for a promise of the README."""
    if item.path.relative_to(TESTS).parts[0] in END_TO_END and not item.get_closest_marker("promise"):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures. Random models and inputs are the same whatever has run before, alone or not."""
    import numpy
    import torch

    # ``torch.manual_seed`` formats the stack for each kind of device that may be used later, which takes a millisecond.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(0)
    numpy.random.seed(0)  # `random` is left alone: DHT nodes have their ids from it
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine with ``run``, in an event loop of its own, or with the function of ``run_by``."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from tests.unit.support import run

    marker = pyfuncitem.get_closest_marker("run_by")
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    (marker.kwargs["function"] if marker else run)(pyfuncitem.obj(**arguments))
    return True


def pytest_collection_finish() -> None:
    """The garbage collector stops every thread while it looks at all modules and tests: servers in this process would
    not answer for so long. What tests import later is as large, so old objects are looked at ten times less often."""
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 10 * old)
