"""A page holds everything it needs, and nothing laid into it is read as anything but text."""

import json

from moefold.web.page_template import render_page, script_safe_json

EVIL = "</script><script>alert(1)</script><!--{{script}}&<b>'\"\u2028"


def test_embedded_json_reads_back_and_has_no_angle_brackets():
    data = {"text": EVIL, "list": [1, None, 2.5]}
    assert json.loads(script_safe_json(data)) == data
    assert not set("<>&") & set(script_safe_json(data))


def test_nothing_laid_into_a_page_is_read_as_a_place_to_insert_or_as_markup():
    made = render_page("page.html", ["page.css"], ["marks.js"], EVIL, {"text": EVIL})
    assert made.text.count("<script") == made.text.count("</script>") == 2
    assert made.text.count(made.script) == made.text.count(made.style) == 1
    assert "<b>" not in made.text
