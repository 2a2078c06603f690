"""The monitor in a browser."""

from __future__ import annotations

import random
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from swarm_gateway.history import recorder as recorders
from swarm_gateway.history.store import HistoryStore, SwarmSample
from swarm_gateway.monitor.server_events import EventKind, SwarmEvent
from swarm_protocol.dht.records import ServerState, WorkTotals
from swarm_protocol.span import Span
from tests.browser.conftest import PHONE, WIDE, serious_violations
from tests.monitored_swarm import MODEL, PEER, FakeMonitor, monitor_served, server
from tests.swarm.waiting import DEADLINE_S, wait_for

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
EVIL = "<img src=x onerror=document.title='owned'>"
expect = playwright_api.expect
expect.set_options(timeout=DEADLINE_S * 1000)


@pytest.fixture(autouse=True)
def often(monkeypatch) -> None:
    monkeypatch.setattr(recorders, "_LOOK_S", 0.1)


@pytest.fixture
def show(new_page) -> Iterator[Callable[..., Any]]:
    """Opens the monitor of a swarm, which must not complain in the console."""
    pages: list[Any] = []
    with ExitStack() as serving:

        def start(
            monitor: FakeMonitor,
            *,
            before: Callable[[Any], object] = lambda page: None,
            keys=(),
            history=None,
            **look: Any,
        ) -> Any:
            url = serving.enter_context(monitor_served(monitor, keys=keys, history=history))
            page = new_page(**look)
            page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
            pages.append(page)
            before(page)
            page.goto(f"{url}/monitor")
            return page

        yield start
        for page in pages:
            page.context.close()  # before the gateway goes, of which it would complain
            refused = re.compile("the server responded with a status of (401|502)")  # the browser says it by itself
            page.problems[:] = [text for text in page.problems if not refused.search(text)]


def row(page: Any, name: str) -> Any:
    return page.locator(".map tbody tr").filter(has=page.get_by_role("button", name=f"…{name[-6:]}", exact=True))


def share(page: Any, name: str) -> tuple[float, float]:
    """Where the bar of a server begins and how long it is, as a share of all blocks, by the pixels drawn."""
    bar, track = (row(page, name).locator(which).first.bounding_box() for which in (".bar", ".track"))
    return (bar["x"] - track["x"]) / track["width"], bar["width"] / track["width"]


def test_who_holds_what(show):
    page = show(FakeMonitor(server("aaaaaa", "0:10"), server("bbbbbb", "5:20")))
    expect(row(page, "aaaaaa")).to_have_count(1)
    assert share(page, "aaaaaa") == pytest.approx((0, 0.5), abs=0.01)
    assert share(page, "bbbbbb") == pytest.approx((0.25, 0.75), abs=0.01)
    assert page.locator(".strip span").all_inner_texts() == ["1"] * 5 + ["2"] * 5 + ["1"] * 10
    expect(page.get_by_role("status")).to_have_text("all blocks are served")
    expect(page.locator(".tiles")).to_contain_text("Blocks missing")


def test_a_rebalancing_is_seen_without_reload(show):
    monitor = FakeMonitor(server("aaaaaa", "0:10"), server("bbbbbb", "10:20"), server("cccccc", "0:10"))
    page = show(monitor)
    expect(row(page, "bbbbbb").locator(".state")).to_have_text("online")
    page.evaluate("window.sameDocument = true")

    monitor.change("bbbbbb", answers=False)
    expect(row(page, "bbbbbb").locator(".state")).to_have_text("not answering")
    expect(page.locator(".strip .lost")).to_have_count(10)
    expect(page.get_by_role("status")).to_have_text(f"{MODEL} cannot be used")
    expect(page.locator(".reasons")).to_have_text(f"no server holds blocks 10:20 of model {MODEL}")
    expect(page.locator(".events")).to_contain_text("…bbbbbb does not answer; it held blocks 10:20")

    monitor.change("cccccc", next_span=Span(10, 20))
    expect(row(page, "cccccc").locator(".state")).to_have_text("moving to 10:20")
    monitor.change("cccccc", next_span=None, span=Span(10, 20), state=ServerState.JOINING)
    expect(row(page, "cccccc").locator(".state")).to_have_text("joining")
    monitor.change("cccccc", state=ServerState.ONLINE)
    monitor.remove("bbbbbb")
    expect(page.get_by_role("status")).to_have_text("all blocks are served")
    expect(page.locator(".strip .lost")).to_have_count(0)
    expect(row(page, "bbbbbb")).to_have_count(0)
    assert share(page, "cccccc") == pytest.approx((0.5, 0.5), abs=0.01)
    expect(page.locator(".events")).to_contain_text("Blocks 10:20 are held again")
    texts = page.locator(".event-text").all_inner_texts()
    said = [
        "…bbbbbb does not answer; it held blocks 10:20",
        "No server holds blocks 10:20",
        "…cccccc moves from blocks 0:10 to 10:20",
        "Blocks 10:20 are held again",
    ]
    assert [text for text in reversed(texts) if text in said] == said
    assert page.evaluate("window.sameDocument")


def a_hundred(num_blocks: int = 80) -> FakeMonitor:
    randomly = random.Random(7)
    servers = []
    for number in range(100):
        length = randomly.choice([4, 8, 12, 20])
        start = randomly.randrange(num_blocks - length + 1)
        speed = float(randomly.randrange(1000))
        span = f"{start}:{start + length}"
        servers.append(server(f"{number:06}", span, num_blocks=num_blocks, tokens_per_s=speed, answers=number % 9 != 4))
    return FakeMonitor(*servers, num_blocks=num_blocks)


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["desktop", "phone"])
def test_a_hundred_servers_of_eighty_blocks_are_readable(show, viewport):
    page = show(a_hundred(), viewport=viewport)
    expect(page.locator(".map tbody tr")).to_have_count(100)
    assert page.locator(".strip span").count() == 80
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out
    box = page.locator(".map tbody tr").nth(50)
    box.scroll_into_view_if_needed()
    assert box.bounding_box()["height"] >= 15
    name = box.locator(".server-name")
    assert name.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 10.5
    assert name.evaluate("e => e.scrollWidth <= e.clientWidth")
    head, scroll = page.locator(".map thead th").first.bounding_box(), page.locator(".map-scroll").bounding_box()
    assert head["y"] == pytest.approx(scroll["y"], abs=1)  # it stays while rows scroll
    narrowest = min(
        each["width"]
        for each in page.locator(".map .bar:not(.next)").evaluate_all("es => es.map(e => e.getBoundingClientRect())")
    )
    assert narrowest >= 4 * (2 if viewport is PHONE else 10)  # of four blocks


def test_finding_and_sorting(show):
    page = show(a_hundred())
    rows = page.locator(".map tbody tr")
    expect(rows).to_have_count(100)
    page.get_by_label("Find a server").fill("00004")
    expect(rows).to_have_count(11)  # 000004, 000040 … 000049
    page.get_by_label("State").select_option("cannot be used")
    expect(rows).to_have_count(3)  # 000004, 000040, 000049
    expect(page.locator(".map-summary")).to_contain_text("3 of 100 servers")
    page.get_by_label("Find a server").fill("")
    page.get_by_label("State").select_option("all states")
    page.get_by_label("Order").select_option("by speed")
    table = page.get_by_role("region", name="Table of servers")
    table.get_by_role("button", name="Speed").click()
    expect(table.locator("th[aria-sort=descending]")).to_have_text("Speed")
    speeds = [float(text) for text in table.locator("tbody td:nth-child(5)").all_inner_texts()]
    assert len(speeds) == 100 and speeds == sorted(speeds, reverse=True)
    names = [page.locator(f"{where} .server-name").first.inner_text() for where in (".map tbody", ".servers tbody")]
    assert names[0] == names[1]
    table.get_by_role("button", name="Speed").click()
    expect(table.locator("th[aria-sort=ascending]")).to_have_text("Speed")


def test_strings_of_strangers_are_text(show):
    peer, model = f"Qm{EVIL}", f"{EVIL}/model"
    evil = server(peer, "0:20", addresses=(EVIL,), adapters=(EVIL,), software_version=EVIL, model=model)
    monitor = FakeMonitor(evil, server("aaaaaa", "0:20"))
    history = HistoryStore(None)
    history.add_events([SwarmEvent(kind, model, peer, EVIL, EVIL, EVIL) for kind in EventKind], 1.0)
    page = show(monitor, history=history)
    expect(page.locator(".tabs button")).to_have_count(2)
    page.get_by_role("group", name="Model").get_by_role("button", name=model).click()
    expect(page.locator(".servers")).to_contain_text(EVIL)
    expect(page.locator(".events li")).to_have_count(len(EventKind))
    assert model in shlex.split(page.locator(".join-command").inner_text())
    page.locator(".map .server-name").first.click()
    expect(page.get_by_role("dialog")).to_contain_text(EVIL)
    monitor.change(peer, answers=False)
    expect(row(page, peer)).to_have_count(1)
    expect(page.locator(".events")).to_contain_text("does not answer")
    assert page.locator("main img, dialog img").count() == 0
    assert "owned" not in page.title()


def test_the_command_to_join_is_copied_once_it_is_known(show):
    disabled_before: list[bool] = []

    def look(page: Any) -> None:
        copy = page.get_by_role("button", name="Copy")
        page.route("**/swarm", lambda route: (disabled_before.append(copy.is_disabled()), route.continue_()), times=1)

    page = show(FakeMonitor(server("aaaaaa", "0:20")), before=look)
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = f"python -m swarm_server --model {MODEL} --swarm home --initial-peers {PEER}"
    assert page.locator(".join-command").inner_text() == command
    wait_for(lambda: page.evaluate("navigator.clipboard.readText()") == command, "the clipboard has the command")
    assert disabled_before == [True]


def test_charts_show_what_was_measured(show):
    history, now = HistoryStore(None), time.time()
    for number in range(100):
        history.add_sample(SwarmSample(8, 7, 10.0 + number % 2, 3, 0.005, 0.1, 0), now - 1000 + 10 * number)
    page = show(FakeMonitor(server("aaaaaa", "0:20")), history=history)
    chart = page.get_by_role("img", name=re.compile(r"^Tokens.s: .*at most 11 since"))
    expect(chart.locator(".line")).to_have_count(1)
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 60, box["y"] + 40)
    expect(page.locator(".chart-now").first).to_have_text(re.compile("^1[01]$"))
    page.get_by_role("button", name="30 d").click()
    expect(page.get_by_role("button", name="30 d")).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".chart").first).to_contain_text(re.compile(r"[A-Z][a-z]{2} \d+"))  # a day, on the axis


def test_contributions(show):
    monitor = FakeMonitor(
        server("aaaaaa", "0:20", work=WorkTotals(20 * 300, 0, 0, 9.0)),
        server("bbbbbb", "0:20", work=WorkTotals(20 * 100, 0, 0, 9.0)),
    )
    page = show(monitor)
    expect(page.locator(".contributions li")).to_have_text(["…aaaaaa300 · 75 %", "…bbbbbb100 · 25 %"])


def test_a_lost_connection_is_said_and_comes_back(show):
    monitor = FakeMonitor(server("aaaaaa", "0:20"))
    page = show(monitor)
    expect(row(page, "aaaaaa")).to_have_count(1)
    alert = page.get_by_role("alert")
    expect(alert).to_be_hidden()
    page.route("**/api/v1/**", lambda route: route.fulfill(status=502, body="a proxy's page"))
    expect(alert).to_contain_text("The server answered with status 502. Trying again in")
    monitor.put(server("bbbbbb", "0:20"))
    page.unroute("**/api/v1/**")
    expect(row(page, "bbbbbb")).to_have_count(1)
    expect(alert).to_be_hidden()
    expect(page.locator(".events li")).to_have_count(1)  # what was missed


def test_a_key_is_asked_for(show):
    page = show(FakeMonitor(server("aaaaaa", "0:20")), keys=("secret",))
    page.get_by_label("Key", exact=True).fill("secret")
    page.get_by_role("button", name="Use key").click()
    expect(row(page, "aaaaaa")).to_have_count(1)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_by_keyboard_alone(show):
    page = show(FakeMonitor(server("aaaaaa", "0:20")))
    expect(row(page, "aaaaaa")).to_have_count(1)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the monitor")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "server-name":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Server …aaaaaa")).to_contain_text("192.0.2.7:4001")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("swarm", ["one", "hundred", "broken"])
def test_axe_finds_nothing_serious(show, viewport, colours, swarm):
    monitors = {
        "one": lambda: FakeMonitor(server("aaaaaa", "0:20")),
        "hundred": a_hundred,
        "broken": lambda: FakeMonitor(server("aaaaaa", "0:10"), server("bbbbbb", "5:20", answers=False)),
    }
    history = HistoryStore(None)
    history.add_events([SwarmEvent(kind, MODEL, "peer", "0:4", "online", "joining") for kind in EventKind], 1.0)
    page = show(monitors[swarm](), viewport=viewport, color_scheme=colours, history=history)
    expect(page.locator(".map tbody tr").first).to_be_visible()
    expect(page.locator(".events li")).to_have_count(len(EventKind))
    assert serious_violations(page) == []


def test_the_events_of_another_history_replace_those_shown(show):
    """A gateway that was started again may have a new history, whose ids begin again."""
    history = HistoryStore(None)
    history.add_events([SwarmEvent(EventKind.JOINED, MODEL, f"peer{number}", "0:4") for number in range(5)], 1.0)
    page = show(FakeMonitor(server("aaaaaa", "0:20")), history=history)
    expect(page.locator(".events li")).to_have_count(5)
    joined = {
        "id": 1,
        "time": 2.0,
        "kind": "joined",
        "model": MODEL,
        "peer_id": "new",
        "short_id": "…new",
        "blocks": "0:4",
    }

    def of_another_history(route: Any) -> None:
        if "limit=" in route.request.url:
            route.fulfill(json={"last_id": 1, "events": [] if "after=" in route.request.url else [joined]})
        else:
            route.fulfill(content_type="text/event-stream", body='event: tick\ndata: {"time": 2.0}\n\n')

    page.route("**/api/v1/events*", of_another_history)
    for hidden in ("true", "false"):  # the page ends its stream while nobody sees it
        page.evaluate(f"Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }})")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator(".events li")).to_have_text([re.compile("…new joined with blocks 0:4")])


def test_axe_finds_nothing_serious_before_the_history_arrives(show):
    """The charts are in the page from the start; they have names before they have points."""
    page = show(
        FakeMonitor(server("aaaaaa", "0:20")), before=lambda page: page.route("**/api/v1/history*", lambda _: None)
    )
    expect(page.locator(".map tbody tr").first).to_be_visible()
    expect(page.get_by_role("img", name="Tokens/s: nothing measured yet")).to_be_visible()
    assert serious_violations(page) == []
