"""Planner page over HTTP: links, results, validation, export and saved plans."""

from __future__ import annotations

import html
import json
import re
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import QueryDict
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.planner import api
from orchestrator.planner.models import SavedPlan
from tests import factories
from tests.webui.pages import compact
from webui.planner.export import ENGINES
from webui.planner.form import parse_form
from webui.planner.form_fields import FIELDS
from webui.planner.plan_link import parse_plan_key, plan_key

pytestmark = pytest.mark.django_db

SMALL = {
    "model": "llama3-8b",
    "device": "h100-80g",
    "nodes": "1",
    "devices_per_node": "8",
    "global_batch_size": "64",
    "seq_len": "4096",
    "tokens": "10G",
    "precision": "bf16",
    "framework": "orrery",
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.fixture
def client(owner: User) -> Client:
    return factories.client_for(owner)


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def sentence(page: str) -> str:
    result = re.search(r'<p class="sentence">(.*?)</p>', page, re.DOTALL)
    assert result
    return text_of(result[1])


def keys_of(page: str) -> list[str]:
    return re.findall(r'data-key-of="([^"]+)"', page)


def get(client: Client, path: str = "/planner/", **changes: Any) -> str:
    answer = client.get(f"{path}?{urlencode({**SMALL, **changes}, doseq=True)}")
    assert answer.status_code == 200, answer.status_code
    return compact(answer.content.decode())


def search(**changes: Any) -> dict[str, Any]:
    state = parse_form(QueryDict(urlencode({**SMALL, **changes})))
    return api.search(
        {**state.line(), "fix": state.fixed(), "objective": state.objective, "top": 36}
    )


def test_page_without_query_shows_results(client: Client) -> None:
    page = compact(client.get("/planner/").content.decode())
    assert re.search(
        r"is the fastest of [\d,]+ plans that fit: .* per step.* MFU .* of 80 GiB", sentence(page)
    )
    assert len(keys_of(page)) == 12
    assert 'href="/planner/" data-key="g p" aria-current="page"' in page


def test_page_matches_the_planner_api(client: Client) -> None:
    result, page = search(), get(client)
    best = result["plans"][0]
    assert keys_of(page)[0] == plan_key(best["plan"])
    assert f"{result['enumerated']:,} valid, {result['fit']:,} fit" in text_of(page)
    copied = json.loads(
        html.unescape(re.search(r'<pre id="plan-json" hidden>(.*?)</pre>', page, re.DOTALL)[1])
    )  # type: ignore[index]
    assert copied["answer"]["step_time_s"] == best["step_time_s"] and copied["plan"] == best["plan"]
    line = {name: value for name, value in copied.items() if name != "answer"}
    assert api.estimate([line])[0]["memory"] == best["memory"]  # what is copied can be state again


def test_link_restores_the_form_state(client: Client) -> None:
    third, fifth = keys_of(get(client))[2:5:2]
    page = get(
        client,
        plan=third,
        compare=[third, fifth],
        objective="memory",
        zero="1",
        intra="200",
        top="24",
    )
    shown = re.search(r'<input type="hidden" name="plan" value="([^"]*)"', page)
    assert shown and shown[1] == third
    state = parse_form(
        QueryDict(
            urlencode({**SMALL, "plan": third, "compare": [third, fifth], "zero": "1"}, doseq=True)
        )
    )
    assert parse_form(QueryDict(state.query())) == state
    for name, value in (("objective", "memory"), ("zero", "1")):
        assert re.search(
            rf'<select id="p-{name}".*?<option value="{value}" selected>', page, re.DOTALL
        ), name
    part = client.get(f"/planner/answer/?{urlencode({**SMALL, 'plan': third})}").content.decode()
    state = parse_qs(re.search(r'data-query="([^"]*)"', part)[1].replace("&amp;", "&"))  # type: ignore[index]
    assert state["plan"] == [third] and state["seq_len"] == ["4096"]


def test_example_links_open_without_errors(client: Client) -> None:
    page = compact(client.get("/planner/examples/").content.decode())
    assert all(shown in text_of(page) for shown in ("120 2 Ψ", "31.4 2 Ψ", "16.6 2 Ψ", "1.9 3 Ψ"))
    links = re.findall(r'<a class="button small" href="([^"]+)">Open<', page)
    assert len(links) >= 4
    for link in links:
        opened = client.get(html.unescape(link)).content.decode()
        assert "Fix these inputs" not in opened, link
    planner = html.unescape(next(link for link in links if link.startswith("/planner/?")))
    fixed = parse_form(QueryDict(urlsplit(planner).query)).fixed()
    assert fixed["tp"] == fixed["pp"] == 1


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"model": "lama3"}, "model", "not one of the choices"),
        ({"model": "own", "shape": ""}, "shape", "is empty"),
        ({"model": "own", "shape": "{"}, "shape", "is invalid"),
        ({"model": "own", "shape": "[" * 20_000}, "shape", "is invalid"),
        ({"model": "own", "shape": "[1]"}, "shape", "must be a JSON object"),
        (
            {
                "model": "own",
                "shape": (
                    '{"layers": 2, "hidden": 65, "heads": 4, "ffn": 8, "vocab": 9, '
                    '"max_seq_len": 9}'
                ),
            },
            "model",
            "does not divide",
        ),
        ({"model": "own", "shape": '{"model_type": "t5"}'}, "model", "t5"),
        ({"device": "h1000"}, "device", "h1000"),
        ({"nodes": "0"}, "nodes", "not between"),
        ({"nodes": "-1"}, "nodes", "-1 is not between 1 and 1,048,576"),
        ({"nodes": "9" * 40}, "nodes", "not an integer"),
        ({"nodes": "2000000"}, "nodes", "not between"),
        ({"seq_len": "8k"}, "seq_len", "not an integer"),
        ({"tokens": "NaN"}, "tokens", "not a number"),
        ({"tokens": "1e999"}, "tokens", "not a number"),
        ({"global_batch_size": ""}, "global_batch_size", "is empty"),
        ({"tp": "7"}, "tp", "7"),
        ({"pp": "64"}, "pp", "64"),
        ({"ep": "3"}, "ep", "no experts"),
        ({"plan": "dp8.<script>"}, "plan", "not a valid plan key"),
        ({"own_memory": "x", "device": "own"}, "own_memory", "not a number"),
        ({"price": "-3"}, "price", "-3 is not between 0 and 1,000,000"),
    ],
)
def test_invalid_input_shows_an_error_at_its_field(
    client: Client, changes: dict[str, str], field: str, message: str
) -> None:
    page = get(client, **changes)
    problems = re.findall(r'<li data-problem="([^"]*)">.*?<span>(.*?)</span>', page, re.DOTALL)
    assert any(place == field and message in html.unescape(shown) for place, shown in problems), (
        problems
    )
    assert not keys_of(page) and "<script>" not in page.split("<main", 1)[1].split("</main>")[0]


def test_huge_cluster_gets_a_result_or_an_error(client: Client) -> None:
    page = get(client, nodes="125000", global_batch_size="1000000")
    assert keys_of(page) or "data-problem" in page or "None of" in sentence(page)


def test_invalid_selected_plan_is_reported_and_replaced(client: Client) -> None:
    page = get(client, plan=plan_key({"dp": 16, "precision": "bf16"}))
    assert "is not valid here" in text_of(page) and "is the fastest of" in sentence(page)


def test_advice_if_no_plan_fits(client: Client) -> None:
    question_ = {"model": "llama3-405b", "device": "l40s-48g", "offload": "none"}
    page = get(client, **question_)
    assert "does not fit" in sentence(page) and "the closest of" in sentence(page)
    changes = re.findall(
        r'<li><span>(.*?)</span><a class="button small" href="([^"]+)" data-take>', page
    )
    assert changes and "Changes that would make it fit" in page
    for _, link in changes:
        assert "plans that fit" in sentence(client.get(html.unescape(link)).content.decode()), link


def test_comparison_shows_differences(client: Client) -> None:
    first, second = (plan_key(each["plan"]) for each in search()["plans"][:12:11])
    page = get(client, compare=[first, second])
    card = page[page.index('id="comparison"') :].split("</section>")[0]
    assert "step time" in card and re.search(r"[+−]\d", card)
    one, two = (parse_plan_key(key, global_batch_size=64) for key in (first, second))
    assert one and two
    assert ("tensor parallel" in card) is (one["tp"] != two["tp"])
    assert 'id="comparison"' not in get(client, compare=[first])


def test_numbers_link_to_their_formula(client: Client) -> None:
    page = get(client, pp="2")
    links = set(re.findall(r'href="(/planner/why/[^"]+)" data-why="([^"]+)"', page))
    names = {name for _, name in links}
    assert {
        "step_time_s",
        "mfu",
        "total_bytes",
        "days",
        "activations_bytes",
        "bubble_s",
        "dp_bytes",
    } <= names
    answer = search(pp="2")["plans"][0]
    for link, name in sorted(links):
        part = client.get(html.unescape(link), headers={"X-Part": "whole"}).content.decode()
        assert f'<span class="mono">{name}</span> = ' in part, name
        if name == "step_time_s":
            assert f"{answer['step_time_s']:.8g} s" in part
    whole = client.get(
        html.unescape(next(link for link, name in links if name == "mfu"))
    ).content.decode()
    assert "<html" in whole and "Back to the plan" in whole
    inner = re.search(r'data-deeper="([^"]+)"', whole)
    assert (
        inner
        and client.get(html.unescape(inner[1]), headers={"X-Part": "inner"}).status_code == 200
    )
    key = keys_of(page)[0]
    assert (
        client.get(
            f"/planner/why/?{urlencode({**SMALL, 'plan': key, 'why': '__class__'})}"
        ).status_code
        == 404
    )
    assert client.get(f"/planner/why/?{urlencode({**SMALL, 'why': 'mfu'})}").status_code == 422


@pytest.mark.parametrize("engine", ENGINES)
def test_export_to_other_engines(client: Client, engine: str) -> None:
    key = plan_key({"dp": 8, "zero": 1, "precision": "bf16", "micro_batch_size": 1})
    query = urlencode({**SMALL, "plan": key, "to": engine})
    shown = client.get(f"/planner/export/?{query}", headers={"X-Part": "whole"}).content.decode()
    assert '<pre class="code-view"' in shown and "></pre>" not in shown
    file = client.get(f"/planner/export/?{query}&download=1")
    assert "attachment" in file["Content-Disposition"] and "64" in file.content.decode()


def test_unsupported_export_is_refused(client: Client) -> None:
    key = plan_key({"dp": 8, "offload": "nvme", "zero": 3, "precision": "bf16"})
    answer = client.get(f"/planner/export/?{urlencode({**SMALL, 'plan': key, 'to': 'torchtitan'})}")
    assert answer.status_code == 422 and "torchtitan" in text_of(answer.content.decode())
    assert (
        client.get(
            f"/planner/export/?{urlencode({**SMALL, 'plan': key, 'to': 'slurm'})}"
        ).status_code
        == 404
    )


def test_uploaded_config_json_is_part_of_the_link(client: Client) -> None:
    file = SimpleUploadedFile(
        "config.json", json.dumps(CONFIG, indent=2).encode(), "application/json"
    )
    sent = client.post(
        "/planner/shape/", {"file": file, "query": urlencode({**SMALL, "seq_len": "1024"})}
    )
    assert sent.status_code == 302
    page = client.get(sent["Location"]).content.decode()
    assert "is the fastest of" in sentence(page) and "hidden_size" in page
    bad = client.post(
        "/planner/shape/", {"file": SimpleUploadedFile("a.bin", b"\xff\x00"), "query": ""}
    )
    assert "Fix these inputs" in client.get(bad["Location"]).content.decode()
    assert client.post("/planner/shape/", {}).status_code == 302


def test_own_devices_by_name_and_by_numbers(client: Client, owner: User) -> None:
    from orchestrator.planner.store import services

    entry = {
        "name": "lab-gpu",
        "peak_tflops": {"bf16": 200.0, "fp32": 30.0},
        "memory_bytes": 48 * 2**30,
        "memory_gb_per_s": 900,
        "intra_node_gb_per_s": 60,
        "inter_node_gb_per_s": 12,
        "power_w": 300,
        "usd_per_hour": 1.0,
    }
    services.device_type_create(by=owner, entry=entry)
    page = get(client, device="lab-gpu")
    assert "of 48 GiB" in sentence(page) and "lab-gpu (mine)" in page
    served = client.get(
        "/planner/serving/", {"model": "llama3-8b", "device": "lab-gpu"}
    ).content.decode()
    assert "llama3-8b on 1 lab-gpu serves" in sentence(served) and "lab-gpu (mine)" in served
    scaled = client.get(
        "/planner/scaling/", {"parameters": "7G", "device": "lab-gpu"}
    ).content.decode()
    assert "64 lab-gpu" in sentence(scaled)
    for address in ("serving", "scaling"):
        answer = client.get(
            f"/planner/{address}/", {"model": "llama3-8b", "parameters": "7G", "device": "nothing"}
        )
        assert answer.status_code == 200 and "device catalog" in answer.content.decode()
    assert "of 24 GiB" in sentence(
        get(
            client,
            device="own",
            own_memory="24",
            own_tflops="300",
            model="gpt2-124m",
            seq_len="1024",
        )
    )


def test_notes_on_host_memory_precision_and_collectives(client: Client) -> None:
    """Unknown host memory, an unsupported precision, volumes by collective."""
    page = get(client, offload="optimizer", zero="2", dp="8")
    assert "if the host has" in sentence(page) and "size is unknown" in text_of(page)
    page = get(client, offload="optimizer", zero="2", dp="8", host="1")
    assert "does not fit: it offloads" in sentence(
        page
    ) and "the host has only 1 GiB per device" in sentence(page)
    assert "v100-32g does not multiply in bf16" in text_of(
        get(client, device="v100-32g", model="llama-15m")
    )
    page = get(client, zero="3", dp="8", precision="bf16")
    assert "By collective" in page and "reduce-scatter" in text_of(page)
    assert "By collective" not in get(client, framework="megatron")
    key = plan_key({"dp": 8, "zero": 3, "precision": "bf16", "micro_batch_size": 1})
    shown = client.get(
        f"/planner/why/?{urlencode({**SMALL, 'plan': key, 'why': 'reduce_scatter_bytes'})}"
    )
    assert "in the reduce dtype" in shown.content.decode()


def test_run_this_plan_fills_the_form(client: Client) -> None:
    page = get(client, tokens="262144000")
    spec = html.unescape(re.search(r'name="spec" value="([^"]*)"', page)[1])  # type: ignore[index]
    form = compact(client.get("/runs/new/", {"spec": spec}).content.decode())
    assert 'name="train.steps" value="1000"' in form and 'name="train.seq_len" value="4096"' in form
    assert 'name="plan.global_batch_size" value="64"' in form
    shown = json.loads(
        html.unescape(
            re.search(r'<textarea id="spec-json"[^>]*>(.*?)</textarea>', form, re.DOTALL)[1]
        )
    )  # type: ignore[index]
    assert shown["model"] == "llama3-8b" and shown["resources"] == {"device": "h100-80g"}
    assert client.get("/runs/new/", {"spec": "{"}).status_code == 422


def test_permissions(client: Client, stranger: User) -> None:
    assert "Run this plan" in get(client)
    assert "Run this plan" not in get(factories.client_for(stranger))
    assert Client().get("/planner/")["Location"].startswith("/login/")


def test_saved_plan_is_shared_with_the_team_and_deleted_by_its_owner(
    client: Client, owner: User, teammate: User, stranger: User
) -> None:
    page = get(client, pp="2")
    query = html.unescape(re.search(r'name="query" value="([^"]*)"><button>Save', page)[1])  # type: ignore[index]
    stored = text_of(
        client.post(
            "/planner/save/", {"query": query, "name": "two stages"}, follow=True
        ).content.decode()
    )
    assert "Saved plan two stages" in stored and "1 saved, 1 of them yours" in stored
    mate = factories.client_for(teammate)
    listed = mate.get("/planner/saved/").content.decode()
    link = html.unescape(re.search(r'data-href="([^"]+)"', listed)[1])  # type: ignore[index]
    assert sentence(mate.get(link).content.decode()) == sentence(page) and "Delete" not in listed
    row = SavedPlan.objects.get()
    SavedPlan.objects.update(link="")  # as saved through REST
    listed = mate.get("/planner/saved/").content.decode()
    link = html.unescape(re.search(r'data-href="([^"]+)"', listed)[1])  # type: ignore[index]
    assert (
        sentence(mate.get(link).content.decode()).partition(": ")[2]
        == sentence(page).partition(": ")[2]
    )
    assert mate.post(f"/planner/saved/{row.pk}/forget/").status_code == 403
    outside = factories.client_for(stranger)
    assert "two stages" not in outside.get("/planner/saved/").content.decode()
    assert outside.post("/planner/save/", {"query": query}).status_code == 403
    assert client.post("/planner/save/", {"query": "model=nothing"}).status_code == 422
    assert (
        client.post(f"/planner/saved/{row.pk}/forget/").status_code == 302
        and not SavedPlan.objects.exists()
    )


@pytest.mark.parametrize(
    "plan",
    [
        {
            "dp": 4,
            "tp": 2,
            "pp": 2,
            "zero": 1,
            "sequence_parallel": True,
            "recompute": "selective",
            "precision": "bf16",
        },
        {"dp": 1, "precision": "fp32"},
        {
            "dp": 8,
            "ep": 4,
            "zero": 3,
            "dp_replicate": 2,
            "prefetch_layers": 0,
            "offload": "optimizer",
        },
        {
            "pp": 4,
            "schedule": "zbv",
            "virtual_stages": 2,
            "stage_layers": [3, 4, 4, 4, 4, 4, 4, 3],
            "precision": "fp8",
        },
        {
            "dp": 2,
            "reduce_dtype": "fp32",
            "grad_dtype": "fp32",
            "micro_batch_size": 3,
            "global_batch_size": 12,
        },
    ],
)
def test_plan_key_round_trip(plan: dict[str, Any]) -> None:
    from workers.contracts import ParallelPlan

    whole = ParallelPlan.from_dict(plan).to_dict()
    assert parse_plan_key(plan_key(whole), global_batch_size=whole["global_batch_size"]) == whole


def test_invalid_plan_keys() -> None:
    for text in (
        "",
        "dp",
        "dp-1",
        "x8",
        "dp8.é",
        "off_",
        "dp8." * 60,
        "l_",
        "rc_full.",
        "z1 or 1=1",
    ):
        assert parse_plan_key(text, global_batch_size=8) is None, text
    assert parse_plan_key("rc_never", global_batch_size=8) == {
        "global_batch_size": 8,
        "recompute": "never",
    }


def test_defaults_of_all_fields_are_valid() -> None:
    assert not parse_form(QueryDict()).problems
    for name, field in FIELDS.items():
        assert not field.slide or field.default == "" or int(field.default) in field.slide, name


def test_what_is_trained_changes_memory_and_is_part_of_the_link(client: Client) -> None:
    full = search()["plans"][0]["memory"]
    lora = search(method="lora", rank="8", task="dpo")["plans"][0]["memory"]
    assert lora["optimizer_bytes"] < full["optimizer_bytes"] / 10
    assert lora["reference_bytes"] == 0, "the base without its adapter is the reference"
    pairs = search(task="dpo")["plans"][0]["memory"]
    assert pairs["reference_bytes"] > 0 == full["reference_bytes"]
    page = get(client, task="dpo", method="qlora")
    assert "task=dpo" in html.unescape(page) and "method=qlora" in html.unescape(page)
    assert "reference" in text_of(get(client, task="dpo"))
    refused = text_of(get(client, task="distill"))
    assert "distillation needs a teacher" in refused
