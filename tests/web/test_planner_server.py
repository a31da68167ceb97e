"""The planner's server: the same answers as the planner, for this machine alone, and nothing but its page."""

import http.client
import json
import select
import time
from collections.abc import Iterator

import pytest

from moefold.plan.answer import answer_request
from moefold.web.legal_layouts import legal_layouts
from moefold.web.planner_server import MAX_CONCURRENT, MAX_QUESTION_BYTES
from tests.support.fuzz_requests import problem_of, run_requests
from tests.support.planner_page import ask, send, served

ONE = {"model": "tiny", "gpus": "2", "gpu": "H100", "seq": 1024, "mbs": 1, "gbs": 8, "parallel.ep": 2}
SEARCH = {"model": "tiny", "gpus": 2, "seq": 1024, "gbs": 8, "search": True, "best": 2}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with served() as running:
        yield running


@pytest.mark.parametrize("question", [ONE, SEARCH, {**ONE, "model": "deepseek-v3-tiny", "recompute": "norm"}])
def test_answers_are_the_planners_own(question: dict[str, object], place: str):
    assert ask(place, "/answer", question) == (200, json.loads(json.dumps(answer_request(question))))


def test_legal_values_come_with_the_nearest_layout(place: str):
    question = {**ONE, "parallel.pp": 2}
    assert ask(place, "/legal", {**question, "hold": "parallel.pp"}) == (200, legal_layouts(question, "parallel.pp"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parallel.ep": 3}, "parallel.ep = 3 does not divide model.moe.experts = 8"),
        ({"gpus": "many"}, "gpus = many is not legal"),
        ({"gpu": "h1000"}, 'no GPU "h1000" (did you mean "h100"?)'),
        ({"precision": "mxfp8"}, "H100 does not multiply in mxfp8"),
        ({"precison": "fp8"}, 'no option "precison" (did you mean "precision"?)'),
        ({"parallel.epp": 2}, 'no key "parallel.epp" (did you mean "parallel.pp"?)'),
        ({"recompute": "<script>"}, 'no region "<script>"'),
        ({"model": "tinny"}, 'no model "tinny" (did you mean "tiny"?)'),
        ({"tokens": float("nan")}, "tokens = NaN is not legal"),
        ({"hold": "x"}, 'no option "hold"'),
    ],
)
def test_what_cannot_be_is_told_in_sentences(change: dict[str, object], says: str, place: str):
    status, reply = ask(place, "/answer", {**ONE, **change})
    assert status == 422
    assert any(says in problem for problem in reply["problems"]), reply


def test_a_pasted_model_is_answered_as_keys_of_a_preset_or_refused_with_the_reason(place: str):
    options = {"model_type": "mixtral", "num_hidden_layers": 8}
    status, reply = ask(place, "/model", {"config_json": json.dumps(options)})
    assert status == 200
    assert reply["model"] == "mixtral-8x7b"
    assert reply["keys"]["model.layers"] == "8"
    planned, answer = ask(place, "/answer", {**ONE, "model": reply["model"], **reply["keys"]})
    assert planned == 200
    assert answer["parameters"] < 46.7e9 / 3
    assert ask(place, "/model", {"config_json": '{"model_type": "bert"}'})[0] == 422


@pytest.mark.parametrize("key", ["model", "gpu"])
@pytest.mark.parametrize("path", ["/answer", "/legal"])
def test_no_file_is_read_for_a_question(path: str, key: str, place: str, tmp_path):
    secret = tmp_path / "secret.yaml"
    secret.write_text("password: 1\n")
    status, reply = ask(place, path, {**ONE, key: str(secret)})
    assert status == 422
    assert "password" not in str(reply)
    assert "no " in reply["problems"][0]


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        ("{", JSON, "no JSON"),
        ("[" * 10_000, JSON, "no JSON"),
        ("[1]", JSON, "no list of keys"),
        ('{"model": {"a": 1}}', JSON, "plain values"),
        ("x" * (MAX_QUESTION_BYTES + 1), JSON, f"more than {MAX_QUESTION_BYTES} bytes"),
        (b"\xff\xfe\x00", JSON, "no JSON"),
        ('{"model": "tiny"}', {"Content-Type": "text/plain"}, "expected application/json"),
        ('{"model": "tiny"}', {}, "expected application/json"),
    ],
)
def test_what_is_no_question_is_refused(body: str | bytes, headers: dict[str, str], says: str, place: str):
    status, _, reply = send(place, "POST", "/answer", body, headers)
    assert status == 400
    assert says in json.loads(reply)["problems"][0]


def test_odd_requests_are_answered_or_refused_and_a_client_that_leaves_is_no_error(place: str):
    """`python -m tests.support.fuzz_requests` sends hundreds; the server's own complaints fail its fixture."""
    half = b"POST /answer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    assert problem_of(place, half) == ""
    assert run_requests(place, 25, seed=7) == []


@pytest.mark.parametrize(
    "path",
    ["/page.css", "/../serve.py", "/..%2fserve.py", "//etc/passwd", "/static/x", "/planner.js", "/%2e%2e/%2e%2e/"],
)
def test_there_is_nothing_but_the_page(path: str, place: str):
    status, headers, body = send(place, "GET", path)
    assert status == 404
    assert body == b"Not Found"
    assert "content-security-policy" in headers


def test_only_the_methods_of_a_route_are_taken(place: str):
    assert send(place, "GET", "/answer")[0] == 405
    assert send(place, "POST", "/", "{}", JSON)[0] == 405


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:1", 200), ("evil.example", 400), ("127.0.0.1.evil.example", 400)]
)
def test_a_foreign_name_for_this_machine_is_refused(host: str, status: int, place: str):
    assert send(place, "GET", "/", headers={"Host": host})[0] == status
    got = send(place, "POST", "/answer", json.dumps(ONE), {**JSON, "Host": host})
    assert got[0] == status


def test_a_foreign_page_gets_no_leave_to_ask(place: str):
    wants = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    status, headers, _ = send(place, "OPTIONS", "/answer", headers=wants)
    assert status == 405
    assert not any(name.startswith("access-control") for name in headers)


def test_the_browser_is_told_to_run_and_ask_nothing_else(place: str):
    status, headers, body = send(place, "GET", "/")
    policy = headers["content-security-policy"]
    assert status == 200
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers
    assert b"{{" not in body
    assert b"http://" not in body.replace(b"http://www.w3.org", b"")


def test_a_search_nobody_waits_for_is_ended_and_too_many_are_refused(place: str):
    """Of three long searches one is refused; sliders are answered beside the others; left alone, these make room."""
    long = {"model": "deepseek-v3", "gpus": 1024, "gpu": "h100", "search": True}
    asked = [http.client.HTTPConnection(place, timeout=120) for _ in range(MAX_CONCURRENT + 1)]
    for each in asked:
        each.request("POST", "/answer", json.dumps(long), JSON)
    answered, _, _ = select.select([each.sock for each in asked], [], [], 60)
    [refused] = [each for each in asked if each.sock in answered]
    assert refused.getresponse().status == 429
    assert ask(place, "/answer", ONE)[0] == 200
    assert ask(place, "/answer", SEARCH)[0] == 429
    for each in asked:
        each.close()
    until = time.monotonic() + 60
    while ask(place, "/answer", SEARCH)[0] == 429:
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_server_that_is_interrupted_ends_its_searches_and_itself():
    """Ends well and without a traceback, which `served` looks for."""
    with served() as place:
        left = http.client.HTTPConnection(place, timeout=120)
        left.request("POST", "/answer", json.dumps({"model": "deepseek-v3", "gpus": 1024}), JSON)
        time.sleep(1)
    left.close()
