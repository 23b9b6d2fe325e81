"""The explorer as a visitor meets it: every screen, in Chromium."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import pytest
import torch

from locant.explore import widget
from locant.explore.screens import answer, screens
from locant.explore.screens.known_bugs import ENTRIES
from locant.explore.session import Session
from tests.explore.conftest import SHOWN, Opens, explorer
from tests.explore.screens import EVALUATED, SCREENS
from tests.lab.fabricated import results
from tests.minilm import MINILM
from tests.tolerances import SEVEN_DIGITS

pytestmark = pytest.mark.browser

STATE = "JSON.parse(document.getElementById('screen').dataset.shown)"


def state_of(page) -> dict[str, str]:
    page.wait_for_selector(SHOWN)
    return page.evaluate(STATE)


def until(page, **settings: str) -> None:
    """Waits until the screen shows these settings."""
    for name, value in settings.items():
        page.wait_for_selector(f"#screen[data-shown*='{json.dumps(name)}:{json.dumps(value)}']:not([aria-busy])")


def until_settled(page) -> None:
    """Waits until the screen shows what the address says."""
    page.wait_for_function(
        """() => {
            const shown = JSON.parse(document.querySelector("#screen:not([aria-busy])")?.dataset.shown ?? "null");
            const wanted = [...new URLSearchParams(location.hash.split("?")[1])];
            return shown && wanted.every(([name, value]) => name === "theme" || shown[name] === value);
        }"""
    )


def is_told(page, selector: str, words: str) -> None:
    """Waits until these words are read somewhere."""
    page.wait_for_function(
        "([selector, words]) => document.querySelector(selector).innerText.includes(words)", arg=[selector, words]
    )


def problem(page) -> str:
    """Waits for what the page says of a mistake, which is text and nothing else."""
    page.wait_for_selector("#notice[data-kind=problem]")
    assert page.locator("#notice").evaluate("each => each.children.length") == 0
    return page.inner_text("#notice")


def close_and_forget(page, opened: Opens) -> None:
    """Of a page that was refused something: Chromium tells of every answer that is no success."""
    page.close()
    opened.said.clear()  # type: ignore[attr-defined]


def test_every_screen_is_visited() -> None:
    assert set(SCREENS) == set(screens())


@pytest.mark.parametrize("name", SCREENS)
def test_a_permalink_restores_its_pictures_with_their_code_which_fit_a_phone_and_back_undoes_a_change(
    opened: Opens, name: str
) -> None:
    visit = SCREENS[name]
    page = opened(f"{name}?{visit.address}")
    given, before = dict(parse_qsl(visit.address)), state_of(page)
    assert {key: before[key] for key in given} == given
    for picture in visit.pictures:
        assert page.locator(f"[data-picture='{picture}'] svg[role=img]").count() == 1, picture
    assert visit.text in page.inner_text("#main")
    require_code_of_each_picture(page, name)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("() => document.documentElement.scrollWidth <= 390")
    for selector in ("button, .tools a, figure, h1, h2, h3, p, svg[role=img]", "#screen section, .scroll, pre"):
        right = page.locator(selector).evaluate_all("all => all.map((each) => each.getBoundingClientRect().right)")
        assert max(right) <= 390, selector
    page.set_viewport_size({"width": 1280, "height": 900})
    control = page.locator(f"[data-setting='{visit.setting}']")
    if control.evaluate("each => each.tagName") == "SELECT":
        control.select_option(visit.value)
    else:
        control.fill(visit.value)
        control.blur()
    until(page, **{visit.setting: visit.value})
    assert dict(parse_qsl(page.url.partition("?")[2]))[visit.setting] == visit.value
    page.go_back()
    until(page, **{visit.setting: before[visit.setting]})
    page.go_forward()
    until(page, **{visit.setting: visit.value})


def require_code_of_each_picture(page, name: str) -> None:
    """The Python that is offered under a picture is the code of that picture."""
    visit = SCREENS[name]
    written = answer(name, dict(parse_qsl(visit.address)), Session())["numbers"]["python"]
    codes = [page.locator(f"[data-picture='{picture}'] pre").text_content() for picture in visit.pictures]
    if isinstance(written, dict):
        assert codes == [written[picture] for picture in visit.pictures]
        assert len({*codes}) == len(codes)
    assert all(code and code == code.strip() + "\n" for code in codes)


@pytest.mark.parametrize("name", SCREENS)
def test_axe_finds_nothing_to_mend_and_a_copied_link_and_a_saved_page_show_the_same(
    opened: Opens, name: str, tmp_path: Path
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    visit = SCREENS[name]
    page = opened(f"{name}?{visit.address}&theme=light")
    for theme in ("light", "dark"):
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == theme
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        if theme == "dark":
            require_link_to_the_same(page, opened)
        page.get_by_role("button", name="Light or dark").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="Save page").click()
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)
    captions = [f"[data-picture='{picture}'] figcaption" for picture in visit.pictures]
    state, told = state_of(page), [page.inner_text(caption) for caption in captions]
    context = page.context
    page.close()  # which would miss its server, and say so
    context.set_offline(True)
    again = opened("", at=saved.as_uri())
    assert state_of(again) == state
    assert [again.inner_text(caption) for caption in captions] == told


def require_link_to_the_same(page, opened: Opens) -> None:
    """A copied link holds every setting and shows the same."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy link").click()
    is_told(page, "#notice", "The link is copied")
    told = page.inner_text("#notice")  # at once: it does not stay
    link, state = page.evaluate("navigator.clipboard.readText()"), state_of(page)
    start, _, part = link.partition("#")
    assert start == page.url.partition("#")[0]
    assert dict(parse_qsl(part.partition("?")[2], keep_blank_values=True)) == {"theme": "dark", **state}
    assert f"locant explore --show '{part}'" in told
    copy = opened(part)
    assert state_of(copy) == state
    copy.close()
    page.bring_to_front()


def test_on_a_phone_the_settings_are_a_sheet_at_the_bottom_beside_what_they_change(opened: Opens) -> None:
    page = opened("compare?length=64")
    page.set_viewport_size({"width": 390, "height": 844})
    control = page.locator("[data-setting='2']")
    control.wait_for(state="hidden")
    page.locator(".settings > summary").click()
    control.wait_for(state="visible")
    top = page.locator(".side").bounding_box()
    assert top is not None
    assert top["y"] > 844 / 3
    assert top["y"] + top["height"] == 844
    control.select_option("t5")
    until(page, **{"2": "t5"})
    assert page.locator("[data-picture=score-by-distance]").bounding_box()["y"] < top["y"]  # type: ignore[index]


def test_another_encoding_changes_what_a_word_attends_to(opened: Opens) -> None:
    page = opened("text?typed=a+list+of+strings+and+a+list+of+numbers&head=2")
    dark = "all => all.map((each) => Number(each.style.fillOpacity))"
    boxes = page.locator("[data-picture=attended] .box")
    before = boxes.evaluate_all(dark)
    attention = answer("text", state_of(page), Session())["numbers"]
    row = np.nan_to_num(attention["attention"]["weights"][attention["at"]])
    np.testing.assert_allclose(before, 0.75 * row / row.max(), rtol=0, atol=SEVEN_DIGITS)
    page.locator("[data-setting=encoding]").select_option("alibi")
    until(page, encoding="alibi")
    assert boxes.evaluate_all(dark) != before
    page.locator("[data-picture=tokens] .word").nth(2).hover()
    is_told(page, "[data-picture=attended] h2", "at position 2 attends to")
    page.locator("[data-picture=far] .glass").click(position={"x": 5, "y": 5})
    until(page, layer="0", head="0")


def test_all_bugs_are_browsed_and_one_that_can_be_seen_is_shown(opened: Opens) -> None:
    page = opened("known_bugs")
    assert page.locator(".bugs li").count() == len(json.loads(ENTRIES.read_text(encoding="utf-8")))
    source = page.locator(".bugs li").first.get_by_role("link").first
    assert source.get_attribute("href") == "https://github.com/EleutherAI/gpt-neox/issues/1003"
    assert source.get_attribute("rel") == "noreferrer"
    page.locator("[data-setting=find]").fill("uint16")
    until(page, find="uint16")
    assert page.locator(".bugs li").count() == 1
    page.get_by_role("button", name="See it").click()
    until(page, bug="ids-wrapped", find="uint16")
    assert "Ids in 16 bits" in page.inner_text("#main")


def test_what_the_page_reads_out_is_what_python_computed(opened: Opens) -> None:
    settings = {"1": "rotary", "2": "alibi", "3": "none", "length": "64", "at": "17"}
    page = opened("compare?" + "&".join(f"{name}={value}" for name, value in settings.items()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the server: the order of a sum is in its last bit
    numbers = answer("compare", settings, Session())["numbers"]
    torch.set_num_threads(threads)
    with page.expect_download() as download:
        page.locator("[data-picture=score-by-distance]").get_by_role("button", name="CSV").click()
    _, *rows = [line.split(",") for line in Path(download.value.path()).read_text("utf-8").splitlines()]
    assert len(rows) == 64
    columns = [value for each in numbers["encodings"] for value in (each["mean"], each["low"], each["high"])]
    for at, row in enumerate(rows):
        read = [struct.pack("f", float(value)) for value in row[1:]]
        assert read == [struct.pack("f", column[at]) for column in columns]
    told = page.locator("[data-picture=score-by-distance] .read").all_inner_texts()
    assert told == [f"{each['mean'][17]:.4g}".replace("-", "−") for each in numbers["encodings"]]


def test_the_legend_reads_each_curve_beside_its_name(opened: Opens) -> None:
    """Also where one in front of it is not drawn."""
    page = opened("compare?1=cope&2=nope&3=alibi&length=160&at=17")
    entries = page.locator("[data-picture=score-by-distance] .legend li").all_inner_texts()
    told = page.locator("[data-picture=score-by-distance] .read").all_inner_texts()
    assert [entry.split()[0].rstrip(",") for entry in entries] == ["cope", "nope", "alibi"]
    assert told == ["", "6", f"{6 - 17 / 2**4:.4g}"]


def test_keys_alone_suffice(opened: Opens) -> None:
    page = opened("compare?length=64")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    until(page, at="11")
    page.keyboard.press("2")
    page.wait_for_function("() => document.activeElement.dataset.setting === '2'")
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[aria-label=Keys]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    while page.evaluate("document.activeElement.dataset.setting") != "alike":
        page.keyboard.press("Tab")
    page.keyboard.press("End")
    until(page, alike="1")


def test_a_key_right_after_a_dialog_has_closed(opened: Opens) -> None:
    page = opened("compare?length=64")
    page.keyboard.press("?")
    page.evaluate(
        """() => {
            document.querySelector("dialog[open]").close();
            document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "?", bubbles: true }));
        }"""
    )
    assert page.get_by_role("dialog", name="Keys").is_visible()


def test_pointing_at_one_picture_is_shown_in_the_others(opened: Opens) -> None:
    page = opened("compare?length=64&3=none")
    glass = page.locator("[data-picture=map-1] .glass")
    glass.scroll_into_view_if_needed()
    box = glass.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + box["height"] * 0.75)
    is_told(page, "[data-picture=map-2] .read", "at query 4")
    told = page.inner_text("[data-picture=map-2] .read")
    assert page.locator("[data-picture=map-1] .read").inner_text().partition("at")[2] == told.partition("at")[2]
    assert "At distance 3" in page.locator("[data-picture=score-by-distance] .note").inner_text()


@pytest.mark.parametrize(
    ("length", "curve", "rows"), [(64, "all keys", ""), (131_072, "256 of the keys", "128 of 131,072")]
)
def test_pictures_say_how_many_positions_they_leave_out(opened: Opens, length: int, curve: str, rows: str) -> None:
    page = opened(f"compare?length={length}&2=none&3=none")
    assert curve in page.inner_text("[data-picture=score-by-distance] .note")
    note = page.inner_text("[data-picture=map-1] .note")
    assert note == "Rotates queries and keys." + (f" The map shows {rows} positions, evenly spaced." if rows else "")


def test_of_many_curves_the_one_that_is_pointed_at_has_its_colour(opened: Opens, tmp_path: Path) -> None:
    losses = {f"e{number}": [(4.0 - number / 8,) * 4] for number in range(9)}
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "results.json").write_text(json.dumps(results(losses)))
    with explorer(str(tmp_path / "report")) as (address, _):
        page = opened("results?report=report", at=address)
        chart = "[data-picture=loss-by-length]"
        color = """name => [...document.querySelectorAll(`${name} .series`)].map((each) =>
            [each.classList.contains("grey"), getComputedStyle(each.querySelector(".curve")).stroke])"""
        assert "Point at a curve or a name" in page.inner_text(f"{chart} .note")
        drawn = page.evaluate(color, chart)
        assert len(drawn) == 9
        assert [grey for grey, _ in drawn].count(False) == 1
        assert len({stroke for grey, stroke in drawn if grey}) == 1
        before = next(stroke for grey, stroke in drawn if not grey)
        page.hover(f"{chart} .legend li:nth-child(3)")
        drawn = page.evaluate(color, chart)
        assert [grey for grey, _ in drawn] == [True] * 8 + [False]  # above the others
        assert drawn[-1][1] not in (before, drawn[0][1])
        page.hover(f"{chart} .glass")  # values beside names may take another line, and the picture moves down
        box = page.locator(f"{chart} .glass").bounding_box()
        assert box is not None
        for share, curve in ((0.02, 0), (0.98, 8)):  # the highest loss, then the lowest
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * share)
            heights = page.evaluate(
                f"() => [...document.querySelectorAll('{chart} .series .curve')].map((each) => each.getBBox().y)"
            )
            own = page.evaluate(f"() => document.querySelector('{chart} .series:not(.grey) .curve').getBBox().y")
            assert own == sorted(heights)[curve]
        page.close()


def test_a_moving_slider_leaves_the_curves_of_before(opened: Opens) -> None:
    page = opened("compare?length=64&3=none")
    assert page.locator("[data-picture=score-by-distance] .faint").count() == 0
    slider = page.locator("[data-setting='1.base']")
    slider.evaluate("each => { each.value = 300; each.dispatchEvent(new Event('input', {bubbles: true})); }")
    page.wait_for_selector("[data-picture=score-by-distance] .faint.slot-1", state="attached")
    slider.evaluate("each => { each.value = 200; each.dispatchEvent(new Event('change', {bubbles: true})); }")
    until_settled(page)
    assert page.locator("[data-picture=score-by-distance] .faint").count() == 1
    assert page.locator("[data-picture=score-by-distance] .faint.slot-1").count() == 1
    page.go_back()
    until(page, **{"1.base": "10000"})


def test_of_a_fast_slider_the_first_and_the_newest_value_are_asked_for(opened: Opens) -> None:
    page = opened("compare?length=64&3=none")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    page.locator("[data-setting=alike]").evaluate(
        """each => {
            for (const value of [100, 200, 300, 400, 500]) {
                each.value = value;
                each.dispatchEvent(new Event("input", { bubbles: true }));
            }
        }"""
    )
    until(page, alike="0.5")
    assert [json.loads(each)["alike"] for each in asked if "alike" in each] == ["0.1", "0.5"]


def test_two_tabs_do_not_disturb_each_other(opened: Opens) -> None:
    one, two = opened("compare?length=64"), opened("rotary?position=7")
    one.locator("[data-setting='2']").select_option("t5")
    two.locator("[data-setting=scaling]").select_option("ntk")
    until(one, **{"2": "t5", "length": "64"})
    until(two, scaling="ntk", position="7")


def test_pictures_are_saved_with_what_the_page_shows(opened: Opens) -> None:
    page = opened("compare?length=64")
    for kind, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as download:
            page.locator("[data-picture=map-1]").get_by_role("button", name=kind).click()
        content = Path(download.value.path()).read_bytes()
        assert content.startswith(start)
    page.locator("[data-picture=map-1]").get_by_role("button", name="Python").click()
    assert "score_map" in page.locator("[data-picture=map-1] pre").inner_text()


def test_a_hostile_address_is_said_and_changes_nothing(opened: Opens) -> None:
    page = opened("compare?length=64")
    before = page.inner_html("#screen")
    for value in ("<img src=x onerror=alert(1)>", "\u202e\u2066gnp.exe", "9" * 5000, "'\"><script>alert(1)</script>"):
        page.evaluate("document.getElementById('notice').dataset.kind = ''")
        page.evaluate("value => location.hash = 'compare?length=' + encodeURIComponent(value)", value)
        assert "for length" in problem(page)
        assert page.inner_html("#screen") == before
    close_and_forget(page, opened)


@pytest.mark.parametrize(
    ("link", "words", "picture"),
    [("compare?1=foo&length=64", "got 'foo' for 1", "map-2"), ("rotary?head_dim=33&pair=5", "got 33", "clock"),
     ("nowhere?x=1", "There is no screen “nowhere”", "map-1")],
)  # fmt: skip
def test_a_bad_link_is_said_and_the_rest_is_shown(opened: Opens, link: str, words: str, picture: str) -> None:
    page = opened(link)
    assert words in problem(page)
    assert page.locator(f"[data-picture='{picture}'] svg[role=img]").count() == 1
    theme = page.get_by_role("button", name="Light or dark")
    theme.click()  # what was not understood is asked for no more
    page.wait_for_selector("#notice", state="hidden")
    page.reload()
    page.wait_for_selector(SHOWN)
    assert page.locator("#notice").is_hidden()


def test_what_is_refused_does_not_hold_the_other_controls(opened: Opens) -> None:
    page = opened("rotary?head_dim=32")
    field = page.locator("[aria-label='Dimensions of a head, as a number']")
    field.fill("33")
    field.press("Enter")
    page.wait_for_selector("#notice[data-kind=problem]")
    field.blur()
    page.locator("[data-setting=scaling]").select_option("ntk")
    until(page, scaling="ntk", head_dim="32")
    assert page.locator("#notice").is_hidden()
    assert field.input_value() == "32"
    slider = page.locator("[data-setting=head_dim]")
    slider.press("ArrowRight")
    until(page, head_dim="34")
    for value in ("300", "301", "305"):
        slider.evaluate("(each, value) => { each.value = value; each.dispatchEvent(new Event('input')); }", value)
    page.wait_for_function("() => !document.querySelector('#screen').ariaBusy")
    assert int(state_of(page)["head_dim"]) % 2 == 0
    assert page.locator("#notice").is_hidden()
    close_and_forget(page, opened)


def test_a_killed_server_is_told_and_nothing_is_lost(opened: Opens) -> None:
    with explorer() as (address, process):
        page = opened("compare?length=64", at=address)
        before = page.inner_text("[data-picture=score-by-distance] .legend")
        process.kill()
        process.wait()
        page.locator("[data-setting='2']").select_option("t5")
        page.wait_for_selector("#notice[data-kind=gone]")
        assert "locant explore" in page.inner_text("#notice")
        assert page.inner_text("[data-picture=score-by-distance] .legend") == before
    close_and_forget(page, opened)


def test_a_token_that_is_chosen_shows_the_nearest_of_a_model(opened: Opens) -> None:
    with explorer(str(MINILM)) as (address, _):
        page = opened("text?typed=the+king+saw+a+house", at=address)
        page.locator("[data-picture=tokens] .word").nth(1).click()
        until(page, at="1")
        told = page.inner_text("[aria-label='Nearest tokens']")
        assert "Nearest to king" in told
        assert "queen" in told
        page.close()


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3, "rope_theta": 5e5}


def drop(page, content: bytes, name: str = "config.json") -> None:
    page.locator("input[type=file]").set_input_files({"name": name, "mimeType": "application/json", "buffer": content})


def test_a_dropped_configuration_is_shown_and_its_extension_can_be_copied(opened: Opens) -> None:
    page = opened("model")
    config = {**LLAMA, "max_position_embeddings": 2048, "comment": "<script>alert(1)</script> \u202e"}
    config["num_hidden_layers"] = 2000  # more than there are pixels for them
    drop(page, json.dumps(config).encode(), "<b>my config</b>.json")
    page.wait_for_selector("text=2000 layers")
    assert "<b>my config</b>.json (llama)" in page.inner_text("#main")
    assert page.locator("#main b, #main script").count() == 0
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy config.json").click()
    page.wait_for_selector("text=Copied")
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert copied["rope_scaling"]["rope_type"] == "yarn"
    assert copied["comment"] == config["comment"]
    permalink = page.url.partition("#")[2]
    assert "2000 layers" in opened(permalink).inner_text("#main")


HOSTILE = [
    (b"[" * 200_000, "is not JSON"),
    (b"\xff\xfe", "is not UTF-8"),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, "is not JSON"),
    (b"x" * 10_000_000, "bytes for a dropped file"),
    (b'{"model_type": "<img src=x onerror=alert(1)>"}', "model_type"),
    (json.dumps({**LLAMA, "num_hidden_layers": 10**9, "hidden_size": "\u202e"}).encode(), "hidden_size"),
]
"""What is dropped, and what is said of it; that of one is not that of the next."""


def test_a_hostile_configuration_is_said_and_changes_nothing(opened: Opens) -> None:
    page = opened("model")
    before = page.inner_html(".pictures")
    for content, words in HOSTILE:
        drop(page, content)
        is_told(page, "#notice", words)
        assert problem(page)
        assert page.inner_html(".pictures") == before
    close_and_forget(page, opened)


def test_a_folder_that_is_dropped_is_looked_into(opened: Opens, tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "results.json").write_text(json.dumps(EVALUATED))
    page = opened("results")
    cdp = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        data = {"items": [], "files": [str(tmp_path / "report")], "dragOperationsMask": 1}
        cdp.send("Input.dispatchDragEvent", {"type": kind, "x": 640, "y": 450, "data": data})
    page.wait_for_selector("[data-picture=pass-keys-1] svg[role=img]")
    assert "Pass keys recalled, of 4: own 0, yarn:4 2." in page.inner_text("#main")
    assert "results.json" in page.locator("[data-setting=report] option:checked").inner_text()
    page.locator("[data-picture=loss-by-length] summary").click()
    rows = page.inner_text("[data-picture=loss-by-length] tbody").splitlines()
    assert [row.split() for row in rows] == [
        ["16", "2", "1.5", "2.5", "3", "2.5", "3.5"],
        ["64", "3", "2.5", "3.5", "–", "–", "–"],
    ]


MODEL = """async (code) => {
    const { default: widget } = await import("data:text/javascript;base64," + code);
    const state = await python(null);
    const heard = [];
    const model = {
        get: (name) => state[name],
        set: (name, value) => (state[name] = value),
        on: (name, then) => heard.push([name, then]),
        off() {},
        async save_changes() {
            for (const [name, value] of Object.entries(await python(state.settings))) {
                const before = state[name];
                state[name] = value;
                if (before !== value) for (const [each, then] of heard) if (each === `change:${name}`) then();
            }
        },
    };
    await widget.render({ model, el: document.getElementById("cell") });
}"""


def test_a_widget_of_a_notebook_shows_what_python_answers(opened: Opens) -> None:
    pytest.importorskip("anywidget", reason="a widget needs the extra `notebook`")
    made = widget("compare?length=64&3=none&theme=dark")
    traits = ("title", "about", "module", "style", "answer", "refused")

    def python(settings: dict[str, str] | None) -> dict[str, object]:
        if settings is not None:
            made.settings = settings
        return {**{name: getattr(made, name) for name in traits}, "settings": made.settings}

    page = opened("", shown=False).context.new_page()
    page.expose_function("python", python)
    page.set_content("<!doctype html><style>p { color: red }</style><div id=cell></div>")
    page.evaluate(MODEL, base64.b64encode(made._esm.encode()).decode())
    page.wait_for_selector("#screen[data-shown] [data-picture=map-1] canvas")
    assert page.locator("#cell").evaluate("each => getComputedStyle(each).colorScheme") == "dark"
    assert page.locator("#about, .heading p").evaluate("each => getComputedStyle(each).color") != "rgb(255, 0, 0)"
    page.locator("[data-setting='2']").select_option("t5")
    page.wait_for_selector('#screen[data-shown*=\'"2":"t5"\']')
    assert made.settings["2"] == "t5"
    assert "t5" in page.inner_text("[data-picture=score-by-distance] .legend")
    page.locator("[data-setting='alike']").focus()
    page.keyboard.press("End")
    page.wait_for_selector('#screen[data-shown*=\'"alike":"1"\']')
    numbers = answer("compare", made.settings, Session())["numbers"]
    told = page.locator("[data-picture=score-by-distance] .read").all_inner_texts()
    assert told == [f"{each['mean'][0]:.4g}".replace("-", "−") for each in numbers["encodings"]]
    page.locator("[aria-label='Length, as a number'], [aria-label^=Length]").last.fill("1")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=for length")
    page.locator("[data-setting='3']").select_option("alibi")  # not with what was refused
    page.wait_for_selector('#screen[data-shown*=\'"3":"alibi"\']')
    assert made.settings["length"] == "64"
    assert made.refused == ""
