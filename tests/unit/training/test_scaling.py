"""A loop that scales its losses by a GradScaler takes the steps of one that does not."""

from __future__ import annotations

import torch

from tests.worlds.runs import SimulatedPeer, World, simulate

OVERFLOWS = 2  # the call whose scaled gradients are not finite


def trained(scaler: torch.amp.GradScaler | None) -> torch.Tensor:
    """Return the parameters after five calls of 4 samples each, of which one is left out."""

    async def scenario() -> torch.Tensor:
        peer = SimulatedPeer.make(World(), 0, target=8)
        await peer.enter()
        optimizer = peer.state._optimizer
        for call in range(5):
            loss = (peer.parameter * torch.linspace(-1.0, call + 1.0, 37)).square().mean()
            if scaler is None:
                if call == OVERFLOWS:
                    continue
                loss.backward()
            else:
                scaler.scale(loss).backward()
                if call == OVERFLOWS:
                    peer.parameter.grad[0] = torch.inf
                scaler.unscale_(optimizer)
            peer.share.add(4, loss.item())
            await peer.drive(peer.share.report())
            if scaler is not None:
                scaler.update()
        assert peer.state.step == 2
        return peer.parameter.detach().clone()

    found: torch.Tensor = simulate(scenario)
    return found


def test_unscaled_gradients_are_those_without_a_scaler_and_what_overflows_is_left_out() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert torch.equal(trained(scaler), trained(None))
    assert scaler.get_scale() == 2.0**9
