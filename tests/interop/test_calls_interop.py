"""Calls between our processes and genuine ones, in both directions.

Worker and client are the same two programs each time; only their interpreters differ.
"""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
from programs import LIMIT_S, Program, Programs, eventually

pytestmark = [pytest.mark.interop, pytest.mark.slow]

NOTICED_S = 1.0
LARGE = 5 * 1024 * 1024
VALUES = [
    {"text": "Grüße", "list": [1, 2.5, None, True], "nested": {"a": {"b": []}}},
    [-(2**63), 2**64 - 1],
    "",
]
NO_STREAM = "Unavailable: Worker generate() failed before response stream"

WORKER = """
from dynamo._core import InvalidArgument

go = asyncio.Event()

async def handle(request, context):
    what, argument = request
    if what == "echo":
        for item in argument:
            yield item
    elif what == "annotated":
        yield {"_dynamo_annotated": True, **argument}
    elif what == "length":
        yield len(argument)
        yield argument
    elif what == "context":
        metadata = context.metadata
        yield [context.id(), {key: metadata[key] for key in argument}]
    elif what == "ValueError":
        yield "before"
        raise ValueError(argument)
    elif what == "InvalidArgument":
        yield "before"
        raise InvalidArgument(argument)
    elif what == "go":
        yield "begun"
        await go.wait()
        yield "finished"
    elif what == "watch":
        yield "begun"
        while not context.is_stopped():
            await asyncio.sleep(0.005)
            if argument == "talking":
                yield "more"
        say("stopped")

async def no_handler(request):
    return None

async def obey(runtime):
    while order := (await line()).strip():
        if order == "go":
            go.set()
        else:
            runtime.shutdown()

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("ns.comp.gen")
    serving = [endpoint.serve_endpoint(handle)]
    serving.append(runtime.endpoint("ns.comp.bad").serve_endpoint(no_handler))
    await (await endpoint.client()).wait_for_instances()
    obeying = asyncio.ensure_future(obey(runtime))
    say(endpoint.connection_id())
    for one in serving:
        await one
    await obeying

run(main)
"""

CLIENT = """
import json
from dynamo._core import InvalidArgument
from dynamo.runtime import Context

def tell(value):
    say(json.dumps(value))

def shown(error):
    bases = [one.__name__ for one in (ValueError, InvalidArgument, ConnectionError)
             if isinstance(error, one)]
    return {"error": str(error), "is": bases}

async def ask(client, what, argument=None, annotated=False, context=None):
    stream = await client.round_robin([what, argument], annotated=annotated,
                                      context=context)
    async for item in stream:
        tell(item)

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("ns.comp.gen").client()
    await client.wait_for_instances()
    try:
BODY
    except Exception as error:
        tell(shown(error))
    say("over")

run(main)
"""


class Pair:
    """Starts workers and clients, one of them with the genuine wheel."""

    def __init__(self, programs: Programs, genuine: str, *, worker_is_ours: bool):
        self._programs = programs
        self._genuine = genuine
        self.worker_is_ours = worker_is_ours

    async def start(self, text: str, *args: str, ours: bool, **env: str) -> Program:
        if ours:
            return await self._programs.start(text, *args, **env)
        return await self._programs.start_genuine(self._genuine, text, *args, **env)

    async def worker(self, *arguments: str, **environment: str) -> Program:
        """A worker that is registered."""
        ours = self.worker_is_ours
        worker = await self.start(WORKER, *arguments, ours=ours, **environment)
        self.instance_id = int(await worker.line())
        return worker

    async def client(self, *body: str) -> Program:
        """A client that does this once it knows an instance."""
        lines = "\n".join(f"        {line}" for line in body)
        text = CLIENT.replace("BODY", lines)
        return await self.start(text, ours=not self.worker_is_ours)

    async def told(self, *body: str) -> list[Any]:
        """Everything that such a client tells, in order."""
        return await all_of(await self.client(*body))


async def all_of(client: Program) -> list[Any]:
    told = []
    while (line := await client.line()) != "over":
        assert line, client.stderr
        told.append(json.loads(line))
    assert await client.ended() == 0
    return told


@pytest.fixture(params=["our client", "our worker"])
def pair(
    request: pytest.FixtureRequest, programs: Programs, genuine_python: str
) -> Pair:
    ours = request.param == "our worker"
    return Pair(programs, genuine_python, worker_is_ours=ours)


# --------------------------------------------------------------------------- streams


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_items_arrive_as_they_were_sent(pair: Pair, codec: str) -> None:
    await pair.worker(DYN_REQUEST_PLANE_CODEC=codec)
    told = await pair.told(f"await ask(client, 'echo', {VALUES!r})")
    assert told == VALUES


async def test_keys_that_are_no_text_survive_the_round_trip(pair: Pair) -> None:
    await pair.worker()
    told = await pair.told(
        "stream = await client.random(['echo', [{1: 2}]], annotated=False)",
        "async for item in stream:",
        "    tell(repr(item))",
    )
    assert told == ["{1: 2}"]


async def test_the_fields_of_an_envelope_arrive(pair: Pair) -> None:
    await pair.worker()
    fields = {"data": {"x": 1}, "event": "news", "comment": ["a", "b"], "id": "7"}
    told = await pair.told(
        f"stream = await client.round_robin(['annotated', {fields!r}])",
        "async for item in stream:",
        "    tell([item.data(), item.event(), item.comments(), item.id()])",
    )
    assert told == [[{"x": 1}, "news", ["a", "b"], "7"]]


async def test_a_large_request_and_a_large_item_pass(pair: Pair) -> None:
    await pair.worker()
    told = await pair.told(
        f"stream = await client.random(['length', 'x' * {LARGE}], annotated=False)",
        "async for item in stream:",
        "    tell(item if isinstance(item, int) else item.count('x'))",
    )
    assert told == [LARGE, LARGE]


async def test_id_and_metadata_of_the_context_arrive(pair: Pair) -> None:
    await pair.worker()
    told = await pair.told(
        "context = Context('request/1', {'tenant': 'Ä', 'empty': ''})",
        "await ask(client, 'context', ['tenant', 'empty'], context=context)",
    )
    assert told == [["request/1", {"tenant": "Ä", "empty": ""}]]


async def test_calls_overlap_on_one_worker(pair: Pair) -> None:
    await pair.worker()
    told = await pair.told(
        "await asyncio.gather(*(ask(client, 'echo', [n]) for n in range(50)))"
    )
    assert sorted(told) == list(range(50))


async def test_our_calls_with_one_id_may_start_together(
    programs: Programs, genuine_python: str
) -> None:
    """A genuine client's fail, and so would ours if they reached the worker at once."""
    pair = Pair(programs, genuine_python, worker_is_ours=False)
    await pair.worker()
    told = await pair.told(
        "context = Context('same')",
        "calls = [ask(client, 'echo', [n], context=context) for n in range(20)]",
        "await asyncio.gather(*calls)",
    )
    assert sorted(told) == list(range(20))


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize(
    ("what", "text", "bases"),
    [
        ("ValueError", "InvalidRequest: ValueError: wrong", ["ValueError"]),
        ("InvalidArgument", "wrong", ["InvalidArgument"]),
    ],
)
async def test_what_a_handler_raises_comes_after_its_items(
    pair: Pair, what: str, text: str, bases: list[str], codec: str
) -> None:
    await pair.worker(DYN_REQUEST_PLANE_CODEC=codec)
    told = await pair.told(f"await ask(client, {what!r}, 'wrong')")
    assert told == ["before", {"error": text, "is": bases}]


async def test_a_handler_that_cannot_be_called_is_refused_and_then_avoided(
    pair: Pair,
) -> None:
    await pair.worker()
    first, second = await pair.told(
        "bad = await runtime.endpoint('ns.comp.bad').client()",
        "await bad.wait_for_instances()",
        "for _ in range(2):",
        "    try:",
        "        await bad.random(None)",
        "    except Exception as error:",
        "        tell(shown(error))",
    )
    assert first["error"].startswith(NO_STREAM)
    assert first["is"] == []
    assert second["error"].startswith("Unavailable: No workers available for endpoint")


# ---------------------------------------------------------------------- cancellation


async def test_a_stopped_context_stops_the_handler_and_ends_the_stream(
    pair: Pair,
) -> None:
    worker = await pair.worker()
    client = await pair.client(
        "context = Context()",
        "stream = await client.random(['watch', None], annotated=False, context=context)",
        "tell(await stream.__anext__())",
        "context.stop_generating()",
        "tell([item async for item in stream])",
        "await line()",
    )
    await worker.says("stopped")
    client.write_line()
    assert await all_of(client) == ["begun", []]


async def test_a_dropped_stream_stops_the_handler(pair: Pair) -> None:
    worker = await pair.worker()
    # A genuine client tells the worker of it only when the next item arrives.
    manner = "talking" if pair.worker_is_ours else "silent"
    client = await pair.client(
        f"stream = await client.random(['watch', {manner!r}], annotated=False)",
        "tell(await stream.__anext__())",
        "del stream",
        "await line()",
    )
    await worker.says("stopped")
    client.write_line()
    assert await all_of(client) == ["begun"]


async def test_the_death_of_a_client_stops_the_handler(pair: Pair) -> None:
    worker = await pair.worker()
    client = await pair.client("await ask(client, 'watch')")
    assert json.loads(await client.line()) == "begun"
    killed_at = client.kill()
    await worker.says("stopped")
    assert time.monotonic() - killed_at < NOTICED_S


# ------------------------------------------------------------------ coming and going


async def test_a_worker_appears_and_leaves_within_a_second(pair: Pair) -> None:
    client = await pair.client(
        "say('seen', *client.instance_ids())",
        "while client.instance_ids():",
        "    await asyncio.sleep(0.005)",
        "say('gone')",
        "await line()",
    )
    worker = await pair.worker()
    registered_at = time.monotonic()
    await client.says(f"seen {pair.instance_id}")
    assert time.monotonic() - registered_at < NOTICED_S
    worker.write_line("shut down")
    worker.write_line()
    shut_down_at = time.monotonic()
    await client.says("gone")
    assert time.monotonic() - shut_down_at < NOTICED_S
    assert await worker.ended() == 0, worker.stderr
    client.write_line()
    assert await all_of(client) == []


async def test_a_stream_outlives_the_shutdown_of_its_worker(pair: Pair) -> None:
    worker = await pair.worker()
    client = await pair.client("await ask(client, 'go')")
    assert json.loads(await client.line()) == "begun"
    for order in ("shut down", "go", ""):
        worker.write_line(order)
    assert await all_of(client) == ["finished"]
    assert await worker.ended() == 0, worker.stderr


async def test_a_killed_worker_breaks_the_stream(pair: Pair) -> None:
    worker = await pair.worker()
    client = await pair.client("await ask(client, 'watch')")
    assert json.loads(await client.line()) == "begun"
    killed_at = worker.kill()
    told = json.loads(await client.line())
    assert time.monotonic() - killed_at < NOTICED_S
    assert told["error"] == "Unavailable: Stream ended before generation completed"
    assert "ValueError" in told["is"]
    assert ("ConnectionError" in told["is"]) is not pair.worker_is_ours
    assert await all_of(client) == []


async def test_sigterm_drains_our_worker_under_a_genuine_client(
    programs: Programs, genuine_python: str
) -> None:
    pair = Pair(programs, genuine_python, worker_is_ours=True)
    text = WORKER.replace(
        "async def main():", "@dynamo_worker()\nasync def main(runtime):"
    )
    made = (
        '    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")\n'
    )
    assert made in text
    worker = await programs.start(text.replace(made, ""))
    await worker.line()
    client = await pair.client("await ask(client, 'go')")
    assert json.loads(await client.line()) == "begun"
    worker.send(signal.SIGTERM)
    await eventually(lambda: not programs.records, NOTICED_S)
    for order in ("go", ""):
        worker.write_line(order)
    assert await all_of(client) == ["finished"]
    assert await worker.ended(LIMIT_S) == 0
