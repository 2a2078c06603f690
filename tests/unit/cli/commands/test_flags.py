"""The flags that several commands share reach the client's config, whichever command is given."""

from __future__ import annotations

import pytest

from swarm_cli.command_line import parse_args
from swarm_client.core import access
from swarm_client.core.config import ClientConfig


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_the_flags_that_name_the_swarm_reach_the_config(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[ClientConfig] = []
    monkeypatch.setattr(access, "client_access", configs.append)  # called with the config to check its files
    args = parse_args([command, "--discover", "--swarm", "s", "--identity", "k"])
    args.command(args)
    assert configs == [ClientConfig(discover=True, swarm="s", identity="k")]
