"""Chromium without a window, driven by selenium, and what a person does with the page of `cacheformers app`."""

import shutil

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--window-size=1280,1080",
]


def start(profile):
    """A browser with an empty profile; None where there is none."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))


class Page:
    """The page in a browser. Scripts only look; whatever changes the page is a drop, a click or a key."""

    def __init__(self, driver, address):
        self.driver = driver
        driver.get(address)
        self.wait(lambda: self.all("#drop button input[type=file]"))

    def wait(self, condition, seconds=180):
        """Wait until a condition holds, and return its value; a page that changes meanwhile is looked at again."""
        waiting = WebDriverWait(self.driver, seconds, 0.05, [StaleElementReferenceException])
        try:
            return waiting.until(lambda _: condition())
        except Exception as error:
            raise AssertionError(self.text("body")) from error

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        """The text that a person sees, over all that fits a selector."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('\\n')"
        return self.driver.execute_script(script, selector)

    def visible(self, element):
        """Whether a part of the document is within its frame."""
        script = "return [...arguments].map(e => e.getBoundingClientRect()).map(r => [r.top, r.bottom])"
        (top, bottom), (frame_top, frame_bottom) = self.driver.execute_script(script, element, self.all("#text")[0])
        return frame_top <= top and bottom <= frame_bottom

    def drop(self, selector, *paths):
        """Drop files onto a dropzone, as from the desktop."""
        place = self.wait(lambda: [part for part in self.all(f"{selector} > button") if part.is_displayed()])[0]
        script = "arguments[0].scrollIntoView({block: 'nearest'}); return arguments[0].getBoundingClientRect()"
        box = self.driver.execute_script(script, place)
        event = {
            "x": box["x"] + box["width"] / 2,
            "y": box["y"] + box["height"] / 2,
            "data": {"items": [], "files": list(map(str, paths)), "dragOperationsMask": 1},
        }
        for kind in ("dragEnter", "dragOver", "drop"):
            self.driver.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, **event})

    def click(self, selector, word):
        """Click what has a text; the first of them."""
        self.wait(lambda: [part for part in self.all(selector) if part.text == word])[0].click()

    def ask(self, question, field="#question", button="#ask"):
        area = self.all(f"{field} textarea, {field} input")[0]
        area.clear()
        area.send_keys(question)
        self.all(button)[0].click()

    def answer(self, question, turns):
        """Ask, and return the answer once it is complete."""
        self.ask(question)
        self.wait(lambda: len(self.all("#conversation .everything")) == turns)
        return self.text("#conversation .answer").split("\n")[-1]

    def compare(self, question, columns):
        """Ask all memories; once each has answered, return the answers by title."""
        self.ask(question, "#compared", "#compare")
        self.wait(lambda: len(self.all("#comparison section")) == columns and "…" not in self.text("#comparison"))
        titles, answers = (self.all(f"#comparison section {part}") for part in ("h4", ".answer"))
        return {title.text: answer.text for title, answer in zip(titles, answers, strict=True)}

    def picture(self):
        """The whole page, as a PNG."""
        script = "return [outerWidth, outerHeight - innerHeight + document.documentElement.scrollHeight]"
        self.driver.set_window_size(*self.driver.execute_script(script))
        return self.driver.get_screenshot_as_png()
