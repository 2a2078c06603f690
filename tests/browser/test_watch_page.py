"""The page of a training run in a browser: what it shows, hostile names, a watcher that is gone, and accessibility."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from swarm_training.commands.watching import as_json
from swarm_training.contract.views import BanView, EventView, PeerView, StagePeerView, StageView, UserView
from swarm_training.web.server import WatchServer
from tests.browser.conftest import PHONE, WIDE, NewPage, serious_violations
from tests.unit.training.reports.test_reporters import VIEW

HOSTILE = "<img src=x onerror=alert(1)>"
RUN = replace(
    VIEW,
    peers=(*VIEW.peers, PeerView("QmHost11223344", HOSTILE, 7, 0.5)),
    users=(UserView("ada", 900, 0.9), UserView(HOSTILE, 100, 0.1)),
    bans=(BanView("QmEvil00000000", 4e9, HOSTILE),),
    events=(EventView(1e9, "…234567 joined"),),
)
STAGE_PEER = StagePeerView("QmStage1234567", 41, 0, 3, True, 2.0, 1)
STAGES = (StageView(0, 41, 0, 3, True, 2.0, (STAGE_PEER,)), StageView(1, 41, 0, 2, False, 1.5))


@pytest.fixture
def server() -> Iterator[WatchServer]:
    with closing(WatchServer("127.0.0.1:0")) as server:
        yield server


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_serious(
    new_page: NewPage, server: WatchServer, scheme: str, viewport: dict[str, int]
) -> None:
    page = new_page(color_scheme=scheme, viewport=viewport)
    for view in (RUN, replace(RUN, step=42, loss=2.25, stages=STAGES)):
        server.show(view, as_json(view))
        page.goto(server.url)
        page.locator("#curve-part").wait_for()
        assert serious_violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_shows_the_run_as_it_goes_on_and_names_as_text(new_page: NewPage, server: WatchServer) -> None:
    page = new_page()
    page.goto(server.url)
    page.get_by_text("Waiting for the first view").wait_for()
    server.show(RUN, as_json(RUN))
    page.get_by_role("heading", name="Run my-run").wait_for()
    facts = page.locator("#facts").inner_text()
    for text in ("41", "2.5000", "about 75 %", "0.125", "step 40", "1 KB"):
        assert text in facts
    cells = page.locator("#peers td").all_inner_texts()
    assert cells[:4] == ["…87654321", "", "10", "412"] and cells[9] == HOSTILE
    assert page.locator("#bans td").all_inner_texts()[2] == HOSTILE and page.locator("img").count() == 1
    later = replace(RUN, step=42, loss=2.25)
    server.show(later, as_json(later))
    page.get_by_role("img", name="2.2500 at step 42").wait_for()
    assert page.evaluate("document.getElementById('curve').decode().then(() => true)")


def test_it_says_that_the_watcher_is_gone_and_goes_on_when_it_is_back(new_page: NewPage) -> None:
    page = new_page()
    with closing(WatchServer("127.0.0.1:0")) as server:
        server.show(RUN, as_json(RUN))
        page.goto(server.url)
        page.get_by_role("heading", name="Run my-run").wait_for()
    page.get_by_text("The watcher cannot be reached").wait_for()
    with closing(WatchServer(server.url.removeprefix("http://").rstrip("/"))) as again:
        later = replace(RUN, step=50)
        again.show(later, as_json(later))
        page.get_by_text("The watcher cannot be reached").wait_for(state="hidden")
        assert page.title() == "Step 50 – my-run"
    page.problems[:] = [each for each in page.problems if "ERR_CONNECTION_REFUSED" not in each]
