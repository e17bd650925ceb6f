# SPDX-License-Identifier: BSD-3-Clause
"""Router for verl's rollouts that sends the samples of a prompt to one replica.

    actor_rollout_ref.rollout.router_config_path=$(python -m flash_attn_dualkv.integrations.verl.router)

verl's own balancer takes the replica with the fewest requests for every sample. With 8 replicas that leaves 2 of 16
samples of a prompt together, computes the prompt on 7 of the replicas, and keeps it in the caches of all of them. This
router needs neither this package's kernels nor its engines, and lies outside of `integrations.verl`, whose import would
change how verl's driver balances. Its settings are those of verl/router.yaml, of which the command prints the path; a
copy may have others.

Two things stay as they are. Running requests do not move, and verl submits all samples of a step at once: how long they
become is not known when they are placed, so that a replica with long ones ends last. And prompts whose tokens are equal
count as one, also where their images differ.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

from .. import checks
from ..errors import SharedPromptError, SharedPromptTypeError

ROUTER_YAML = Path(__file__).with_name("verl") / "router.yaml"
ENTRY_BYTES = 160  # of an entry beside its key, as tracemalloc counts them
# Digests of 128 bits do not collide, and are the same in all processes, as `hash` of a request id
# is not.
DIGEST_BYTES = 16
SLACK_RESPONSES = 12

V = TypeVar("V")


@dataclass(frozen=True)
class Settings:
    """Entries of router.yaml beside verl's `router_class`.

    Attributes:
        expected_response: tokens that a sample is counted with, next to its prompt.
        slack: tokens that a replica may be ahead of the emptiest one and still get its prompts' next samples; None: 12
            expected responses. More keeps more together: with 16, 14.0 of 16 samples of 2K tokens instead of 13.0, and
            the replica with most to generate then has 1.16 times the mean instead of 1.13.
        max_bytes: of what is remembered of prompts, and the same of request ids; the ones used last stay.
        full_determinism: a prompt's tokens alone decide, whatever the load. verl keeps its own
            `rollout.full_determinism` from routers of a YAML: set both.
    """

    expected_response: int = 1024
    slack: int | None = None
    max_bytes: int = 1 << 26
    full_determinism: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """From the dict that verl reads out of the YAML."""
        given = {name: value for name, value in config.items() if name != "router_class"}
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            names = ", ".join(cls.__dataclass_fields__)
            raise SharedPromptError("router_config_path", f"a YAML with {names}", ", ".join(sorted(map(str, unknown))))
        settings = cls(**given)
        checks.integer("expected_response", settings.expected_response, 1)
        checks.integer("slack", settings.slack_tokens, 0)
        checks.integer("max_bytes", settings.max_bytes, 1)
        checks.flag("full_determinism", settings.full_determinism)
        return settings

    @property
    def slack_tokens(self) -> int:
        return SLACK_RESPONSES * self.expected_response if self.slack is None else self.slack


class Recent(Generic[V]):
    """The entries that were used last, within a number of bytes; there is always room for one."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.entries: OrderedDict[str | bytes, V] = OrderedDict()

    def get(self, key: str | bytes) -> V | None:
        if key not in self.entries:
            return None
        self.entries.move_to_end(key)
        return self.entries[key]

    def put(self, key: str | bytes, value: V) -> None:
        if key not in self.entries:
            self.bytes += _bytes_of(key)
        self.entries[key] = value
        self.entries.move_to_end(key)
        while self.bytes > self.max_bytes and len(self.entries) > 1:
            self.drop(next(iter(self.entries)))

    def drop(self, key: str | bytes) -> None:
        del self.entries[key]
        self.bytes -= _bytes_of(key)

    def clear(self) -> None:
        self.entries.clear()
        self.bytes = 0


def _bytes_of(key: str | bytes) -> int:
    return sys.getsizeof(key) + ENTRY_BYTES


@dataclass(slots=True)
class Sample:
    """A request id, whose turns and resumed parts stay where its first one went."""

    prompt: bytes  # digest of the first turn's
    prompt_tokens: int
    server: str | None = None
    ends: int | None = None  # as a home's


@dataclass(slots=True)
class Home:
    """The replica that a prompt's samples go to."""

    server: str
    ends: int | None = None  # count of ended requests from which on an idle one is over; None while some run


@dataclass
class Replica:
    """A server and what runs there."""

    handle: Any
    tokens: int = 0  # prompts once, and those of each running request
    requests: int = 0
    running: dict[str, list[tuple[Sample, int]]] = field(default_factory=dict)  # by request id
    prompts: dict[bytes, int] = field(default_factory=dict)  # running requests of each

    def start(self, request_id: str, sample: Sample, own: int) -> None:
        self.running.setdefault(request_id, []).append((sample, own))
        before = self.prompts.get(sample.prompt, 0)
        self.prompts[sample.prompt] = before + 1
        self.requests += 1
        self.tokens += own + (0 if before else sample.prompt_tokens)

    def end(self, request_id: str) -> Sample:
        """The sample of one of the id's requests, of which nothing is left here."""
        sample, own = self.running[request_id].pop()
        if not self.running[request_id]:
            del self.running[request_id]
        self.prompts[sample.prompt] -= 1
        if not self.prompts[sample.prompt]:
            del self.prompts[sample.prompt]
            self.tokens -= sample.prompt_tokens
        self.requests -= 1
        self.tokens -= own
        return sample


class SiblingRouter:
    """verl 0.9's router protocol (`verl.workers.rollout.router.RequestLoadBalancer`), which keeps siblings together.

    A prompt goes where its first sample went, unless that replica is ahead of the emptiest one by more than `slack` and
    the prompt's own tokens, which the other would have to compute and to hold once more. Then the emptiest one is where
    the prompt's next samples go.

    The first request of an id is a sample with its prompt, and later ones, turns and resumed parts, go where it went. A
    prompt's place is given up once as many requests have ended as were running when its last one did: at the end of a
    step all of them have, so that the next validation places its prompts anew. So is an id that then comes with another
    prompt: verl counts the samples of each step from 0 where `rollout.full_determinism` is set.

    Args:
        servers: handles of replicas by their ids; may be empty.
        config: entries of the YAML; None: router.yaml's.

    Raises:
        SharedPromptError: an entry is unknown or out of its bounds.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        self._settings = Settings.of(config or {})
        self._replicas: dict[str, Replica] = {}
        self._homes: Recent[Home] = Recent(self._settings.max_bytes)
        self._samples: Recent[Sample] = Recent(self._settings.max_bytes)
        self._ended = 0  # requests
        self.add_servers(servers)

    def require_acquire_fields(self) -> list[str]:
        """Fields of `generate()` that verl hands to `acquire_server`."""
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        """Fields that verl hands to `release_server`."""
        return ["request_id"]

    def acquire_server(self, request_id: str, prompt_ids: Sequence[int] | None = None) -> tuple[str, Any]:
        """The replica for a request: its id and its handle.

        Args:
            request_id: of a sample; its turns have the same one.
            prompt_ids: tokens of the prompt, or of all that the sample has so far. In a step only those of an id's
                first request are hashed; a request without any is a prompt of its own.

        Raises:
            RuntimeError: there is no replica. verl's client waits on these words.
            SharedPromptTypeError: `prompt_ids` are no ints.
        """
        if not self._replicas:
            raise RuntimeError("No available servers in load balancer")
        given: Sequence[int] = () if prompt_ids is None else prompt_ids
        sample = self._samples.get(request_id)
        is_over = sample is not None and self._is_over(sample.ends)
        if sample is None or (is_over and _digest(request_id, given[: sample.prompt_tokens]) != sample.prompt):
            sample = Sample(_digest(request_id, given), len(given))
            self._samples.put(request_id, sample)
        sample.ends = None
        if sample.server is None:
            sample.server = self._place(sample)
        home = self._homes.get(sample.prompt)
        if home is not None and home.server == sample.server:
            home.ends = None
        replica = self._replicas[sample.server]
        more = max(0, len(given) - sample.prompt_tokens)
        replica.start(request_id, sample, more + self._settings.expected_response)
        return sample.server, replica.handle

    def _place(self, sample: Sample) -> str:
        """The id of the replica for a sample that has none."""
        if self._settings.full_determinism:
            servers = list(self._replicas)
            return servers[int.from_bytes(sample.prompt, "big") % len(servers)]
        tokens = {server: replica.tokens for server, replica in self._replicas.items()}
        emptiest = min(tokens, key=lambda server: (tokens[server], self._replicas[server].requests))
        home = self._homes.get(sample.prompt)
        if home is not None and not self._is_over(home.ends):
            ahead = tokens[home.server] - tokens[emptiest] - sample.prompt_tokens
            if ahead <= self._settings.slack_tokens:
                return home.server
        self._homes.put(sample.prompt, Home(emptiest))
        return emptiest

    def _is_over(self, ends: int | None) -> bool:
        return ends is not None and ends <= self._ended

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Frees a request's tokens; one that is not running there, as on a replica that was removed, is ignored."""
        replica = self._replicas.get(server_id)
        if replica is None or request_id not in replica.running:
            return
        sample = replica.end(request_id)
        self._ended += 1
        sample.ends = self._ended + self.get_total_inflight()
        home = self._homes.get(sample.prompt)
        if home is not None and home.server == server_id and sample.prompt not in replica.prompts:
            home.ends = sample.ends

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Adds replicas, empty ones; one that is there already begins anew with its new handle."""
        self.remove_servers([server for server in servers if server in self._replicas])
        self._replicas.update({server: Replica(handle) for server, handle in servers.items()})

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Removes replicas; what ran there or was at home there is placed anew when it comes again."""
        removed = {server: self._replicas.pop(server) for server in server_ids if server in self._replicas}
        self._ended += sum(replica.requests for replica in removed.values())
        # Nothing waits for a replica that comes back: its caches are empty then.
        for prompt, home in [*self._homes.entries.items()]:
            if home.server in removed:
                self._homes.drop(prompt)
        for sample in self._samples.entries.values():
            if sample.server in removed:
                sample.server = None

    def get_all_servers(self) -> list[str]:
        """Ids of the replicas."""
        return [*self._replicas]

    def get_total_inflight(self) -> int:
        """Running requests of all replicas."""
        return sum(replica.requests for replica in self._replicas.values())

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Places everything anew when it comes again, resumed samples by the prompt that they began with."""
        cleared = [sample for sample in self._samples.entries.values() if sample.server is not None]
        for sample in cleared:
            sample.server = None
        self._homes.clear()
        return {"cleared_entries": len(cleared), "server_loads": self._requests()}

    def get_status(self) -> dict[str, Any]:
        """Running requests and tokens by replica, and how much is remembered."""
        return {
            "servers": self._requests(),
            "tokens": {server: replica.tokens for server, replica in self._replicas.items()},
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self._replicas),
            "registered_handles": self.get_all_servers(),
            "prompts": len(self._homes.entries),
            "request_ids": len(self._samples.entries),
        }

    def _requests(self) -> dict[str, int]:
        return {server: replica.requests for server, replica in self._replicas.items()}


def _digest(request_id: str, prompt_ids: Sequence[int]) -> bytes:
    try:
        values = array("q", prompt_ids).tobytes() if len(prompt_ids) else request_id.encode()
    except TypeError:
        raise SharedPromptTypeError("prompt_ids", "token ids", checks.describe(prompt_ids)) from None
    return blake2b(values, digest_size=DIGEST_BYTES).digest()
