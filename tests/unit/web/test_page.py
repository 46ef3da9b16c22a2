"""The page in a real Chromium, under its own policy: hostile names are text, nothing is violated, loss is said."""

import re
import shutil
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, async_playwright, expect

from p2prl.events import Ring
from p2prl.status import StepRow, encode
from tests.unit.web.nodes import HOSTILE, STARTED_AT, TOKEN, Served, served

pytestmark = pytest.mark.needs("chromium")
SLOW_MS = 30_000


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        page = await browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(SLOW_MS)
        yield page
        await browser.close()


def complaints_of(page: Page) -> list[str]:
    """Everything the browser objects to from now on: refused loads, errors, violated policy, dialogs."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("dialog", lambda dialog: found.append(dialog.message))
    return found


async def log_in(page: Page, node: Served) -> None:
    reply = await page.context.request.post(
        f"{node.url}/api/v1/login-code", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    await page.goto(f"{node.url}/login#{(await reply.json())['code']}")
    await expect(page.locator("#name")).to_have_text("quiet-otter", timeout=SLOW_MS)


def step(number: int) -> StepRow:
    metrics = {"loss": 0.1, "ess_ratio": 0.9, "lr_multiplier": 0.8}
    return StepRow(
        step=number,
        version=f"1.{number}.deadbeef",
        reward_mean=0.8,
        num_groups=32,
        at=STARTED_AT,
        wall_s=0.5,
        metrics=metrics,
    )


async def test_every_page_works_under_the_policy_with_hostile_names(page: Page) -> None:
    async with served(Ring()) as node:
        complaints = complaints_of(page)
        node.ring.publish("step", step(41))
        await log_in(page, node)
        assert "login" not in page.url
        await expect(page.locator("#state")).to_have_text("working", timeout=SLOW_MS)
        await expect(page.locator("main")).to_contain_text("enable NTP")
        await expect(page.locator(".plot canvas")).to_have_count(4, timeout=SLOW_MS)

        await page.click("nav a[href='#peers']")
        await expect(page.locator("td.text").first).to_have_text(HOSTILE, timeout=SLOW_MS)
        assert await page.locator("main img").count() == 0

        await page.click("nav a[href='#training']")
        await expect(page.locator("section.scroll tbody tr")).to_have_count(1, timeout=SLOW_MS)
        node.ring.publish("step", step(42))
        await expect(page.locator("section.scroll tbody tr").first).to_contain_text("1.42.deadbeef", timeout=SLOW_MS)
        await expect(page.locator(".plot canvas")).to_have_count(8, timeout=SLOW_MS)

        await page.click("nav a[href='#weights']")
        await expect(page.locator("#versions tbody tr")).to_have_count(13, timeout=SLOW_MS)
        newest = page.locator("#versions tbody tr").first
        await expect(newest).to_contain_text("delta from 41: 1.1 MB, 0.42 %")
        await expect(newest).to_contain_text("state and delta")
        await expect(newest.locator("td.text")).to_have_text(HOSTILE)
        await expect(page.locator("#versions tbody tr").nth(2)).to_contain_text("anchor: 269.1 MB, 100 %")
        await expect(page.locator("#versions tbody tr").last).to_contain_text("(not here)")
        await expect(page.locator("#holders tbody tr").last).to_contain_text("amber-fox")
        await expect(page.locator("#holders tbody tr").last.locator("td").nth(3)).to_have_text("3")
        await expect(page.locator("main")).to_contain_text("1.2 MB/s of 2.0 MB/s")
        await expect(page.locator("main")).to_contain_text("3.4 MB/s, no cap")
        await expect(page.locator("main")).to_contain_text("1.44.deadbeef, 1 of 3 files whole, 3.0 kB of 4.0 kB")
        coming = page.locator("#fetches tbody tr")
        await expect(coming).to_have_text(
            re.compile(r"1\.43\.deadbeef\s*anchor\s*120\.0 MB of 269\.1 MB.*3\.1 MB/s\s*2 peers", re.S)
        )
        await expect(page.locator("meter").first).to_have_attribute("value", "1200000")
        await expect(page.locator(".plot canvas")).to_have_count(2, timeout=SLOW_MS)
        assert await page.locator("main img").count() == 0

        await page.click("nav a[href='#logs']")
        await expect(page.locator(".log li")).to_have_count(2, timeout=SLOW_MS)
        await expect(page.locator(".log li").last).to_contain_text("<img src=x")
        await page.fill("#filter", "group done")
        await expect(page.locator(".log li")).to_have_count(1)
        node.ring.publish("log", node.node.logs("info", "rollout", 0, 1)[0])
        await expect(page.locator(".log li")).to_have_count(2, timeout=SLOW_MS)
        assert complaints == []


async def test_it_says_when_the_daemon_is_gone_and_comes_back(page: Page) -> None:
    ring = Ring()
    async with served(ring) as node:
        await log_in(page, node)
        await expect(page.locator("#state")).to_have_text("working", timeout=SLOW_MS)
        port = node.port
    await expect(page.locator("#banner")).to_contain_text("daemon is gone", timeout=SLOW_MS)
    async with served(Ring(first_id=10_000), port) as node:
        await expect(page.locator("#banner")).to_have_text("", timeout=SLOW_MS)
        node.ring.publish("status", encode(node.node.status).replace(b'"now":"working"', b'"now":"draining"'))
        await expect(page.locator("#state")).to_have_text("draining", timeout=SLOW_MS)


async def test_without_a_login_it_says_how_and_shows_nothing(page: Page) -> None:
    async with served() as node:
        await page.goto(node.url)
        await expect(page.locator("#banner")).to_contain_text("p2prl web", timeout=SLOW_MS)
        await expect(page.locator("body")).not_to_contain_text("quiet-otter")
        await page.goto(f"{node.url}/login#wrong-code")
        await expect(page.locator("#banner")).to_contain_text(re.compile("login code is wrong"), timeout=SLOW_MS)
