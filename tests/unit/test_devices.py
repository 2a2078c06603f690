"""Which device is the best, and devices that are refused, by what torch says that it has."""

from __future__ import annotations

import logging

import pytest
import torch

from swarm_models.gpu import devices
from swarm_models.gpu.devices import available_devices, best_device, default_dtype, named_device
from swarm_protocol import system
from swarm_server.core.config import ServerConfig
from swarm_server.machine.memory import available_bytes
from swarm_server.node import hosting
from swarm_server.node.hosting import devices_and_dtype
from swarm_training.stages.commands.running import device_named

MPS = torch.device("mps")


@pytest.fixture
def having(monkeypatch):
    """Makes torch say that it has these kinds of accelerators and no others."""

    def have(*kinds: str) -> None:
        for kind, backend in (("cuda", torch.cuda), ("xpu", torch.xpu), ("mps", torch.backends.mps)):
            monkeypatch.setattr(backend, "is_available", lambda kind=kind: kind in kinds)

    return have


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [((), "cpu"), (("mps",), "mps"), (("xpu",), "xpu"), (("mps", "xpu"), "xpu"), (("xpu", "cuda"), "cuda")],
)
def test_the_best_of_those_that_torch_has(having, kinds, expected):
    having(*kinds)
    assert best_device() == expected
    assert available_devices()[-1] == "cpu" and set(available_devices()) == {*kinds, "cpu"}


def test_what_is_not_there_is_refused_by_name(having):
    having("mps")
    with pytest.raises(ValueError, match=r"device 'cuda:1' cannot be used: .* no cuda here, but mps and cpu"):
        named_device("cuda:1")
    with pytest.raises(ValueError, match="device 'mps' cannot be used: "):
        named_device("mps")  # torch says that it has one, and then fails
    with pytest.raises(ValueError, match="device 'abacus' is unknown: expected cpu, cuda, xpu, mps"):
        named_device("abacus")
    assert named_device("cpu", torch.float64) == torch.device("cpu")


def test_a_device_that_cannot_compute_in_a_dtype_is_refused():
    with pytest.raises(ValueError, match=r"device 'meta' cannot compute in bfloat16 \(.+\): choose float32"):
        named_device("meta", torch.bfloat16)  # it has no numbers
    with pytest.raises(ValueError, match=r"device 'meta' cannot compute in float64 \(.+\): choose another device"):
        named_device("meta", torch.float64)


def test_a_server_takes_an_accelerator_that_runs_the_quantisation(having, monkeypatch, caplog):
    monkeypatch.setattr(hosting, "named_device", lambda name, _dtype=None: torch.device(name))
    with caplog.at_level(logging.WARNING, "swarm_server.node.hosting"):
        having("mps")
        assert devices_and_dtype(ServerConfig(quant="none")) == ((MPS,), torch.float32)
        having("cuda")
        assert devices_and_dtype(ServerConfig()) == ((torch.device("cuda"),), torch.bfloat16)
        having()
        assert devices_and_dtype(ServerConfig()) == ((torch.device("cpu"),), torch.float32)
        with pytest.raises(ValueError, match=r"cpu has no FP8 products, .*: expected int8, int4, "):
            devices_and_dtype(ServerConfig(quant="fp8"))
        assert caplog.text == ""
        having("mps")
        assert devices_and_dtype(ServerConfig()) == ((torch.device("cpu"),), torch.float32)
    assert "mps is left out, because int8 does not run there: --quant none does" in caplog.text
    with pytest.raises(ValueError, match="int8 runs on cpu and cuda, not on mps: choose none, or the device cpu"):
        devices_and_dtype(ServerConfig(device="mps"))
    having("cuda")
    with pytest.raises(ValueError, match="int4 runs on cpu, not on cuda: choose nf4"):
        devices_and_dtype(ServerConfig(quant="int4"))


def test_stages_need_float64(having, monkeypatch):
    having("mps")
    assert device_named("auto") == "cpu"  # neither here nor on a Mac
    having("xpu")
    monkeypatch.setattr(devices, "_refusal", lambda device, _dtype: None)
    assert best_device(torch.float64) == "xpu"


def test_bfloat16_is_for_accelerators_that_have_it():
    kinds = [(kind, default_dtype(torch.device(kind))) for kind in ("cuda", "xpu", "mps", "cpu")]
    assert [kind for kind, dtype in kinds if dtype == torch.bfloat16] == ["cuda", "xpu"]


def test_memory_of_accelerators(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 100)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 30)
    assert available_bytes(MPS) == 70
    monkeypatch.setattr(system, "available_bytes", lambda: 50)  # its memory is the machine's
    assert available_bytes(MPS) == available_bytes(torch.device("cpu")) == 50
    properties = type("Properties", (), {"total_memory": 100})
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.xpu, "memory_allocated", lambda _device: 40)
    assert available_bytes(torch.device("xpu:1")) == 60
