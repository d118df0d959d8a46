"""Makes the README's pictures: a light fleet with some traffic, looked at by a real browser.

    python -m tests.console.screenshots        from the root of the repository; half a minute

Needs Pillow, which vLLM brings. Look at them before you commit them.
"""

import random
import tempfile
import threading
import time
from pathlib import Path

from PIL import Image
from tests.console_world import WORDS, Page, World, browser, until, world

HERE = Path(__file__).parent / "screenshots"
SEED = 4
TALKS, TURNS = 4, 4
STRANGERS = 10
RUNNING = 5
COLOURS = 256
DESK, PHONE = (1280, 800), (390, 844)


def traffic(fleet: World) -> str:
    """Conversations beside each other and many single requests; the last turn's transfer."""
    rng = random.Random(SEED)
    last: list[str] = []

    def talk(name: str) -> None:
        for turn in range(TURNS):
            prompt = f"{name}: {WORDS * 2 * (turn + 2)}"
            answer = fleet.ask({"prompt": prompt, "conversation_id": name, "max_tokens": 60}, x_kvbus_mode="early")
            last.append(answer.headers["x-kvbus-transfer"])
            time.sleep(rng.uniform(0.5, 2))

    def stranger() -> None:
        time.sleep(rng.uniform(0, 12))
        body = {"prompt": f"{rng.random()} {WORDS * rng.choice((2, 6, 12))}", "max_tokens": rng.choice((20, 120))}
        fleet.ask(body, x_kvbus_mode=rng.choice(("early", "early", "deferred")))

    threads = [threading.Thread(target=talk, args=(f"talk {number}",)) for number in range(TALKS)]
    threads += [threading.Thread(target=stranger) for _ in range(STRANGERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return last[-1]


def busy(fleet: World, stop: threading.Event) -> None:
    """Something runs until `stop`."""

    def one(number: int) -> None:
        turn = 0
        while not stop.wait(number / 10):
            turn += 1
            fleet.ask({"prompt": f"{number} {turn} {WORDS * 5}", "max_tokens": 500}, x_kvbus_mode="early")

    for number in range(RUNNING):
        threading.Thread(target=one, args=(number,), daemon=True).start()


def shot(page: Page, name: str) -> None:
    time.sleep(0.6)
    file = HERE / f"{name}.png"
    page.driver.save_screenshot(str(file))
    with Image.open(file) as image:
        image.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size // 1024} kB")  # noqa: T201


def load(page: Page, size: tuple[int, int], colours: str, path: str = "/") -> None:
    page.size(*size)
    page.colours(colours)
    page.open(path)
    until(lambda: page.text("#bus b") == "connected" and page.rows("finished"), "the page")


def tab(page: Page, name: str, word: str) -> None:
    page.click(f"#tab-{name}")
    until(lambda: word in page.text("#pane"), name)


def make(fleet: World, page: Page) -> None:
    transfer = traffic(fleet)
    stop = threading.Event()
    busy(fleet, stop)
    for colours in ("dark", "light"):
        load(page, DESK, colours)
        until(lambda: len(page.rows("running")) > RUNNING // 2, "running transfers")
        shot(page, f"overview-{colours}")
    load(page, DESK, "light", f"/#t={transfer}")
    until(lambda: page.text("#pane .fall"), "the waterfall")
    shot(page, "waterfall-light")
    tab(page, "conversation", "Turn")
    shot(page, "conversation-light")
    load(page, DESK, "dark", f"/#t={transfer}")
    tab(page, "why", "Policy")
    shot(page, "why-dark")
    load(page, PHONE, "dark")
    shot(page, "phone-dark")
    stop.set()


def main() -> None:
    """All of them."""
    arguments = ("--prefill", "2", "--decode", "2", "--blocks", "512")
    with (
        tempfile.TemporaryDirectory(prefix="kvbus-screenshots-") as work_dir,
        world(Path(work_dir), *arguments) as fleet,
        browser(fleet.console_url) as page,
    ):
        make(fleet, page)


if __name__ == "__main__":
    main()
