"""Prometheus metrics: vLLM's names where it has one, so that its dashboards work, and our own."""

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.core.outputs import Delta, RequestOutput
from slipstream.engine.engine import Engine
from slipstream.server.live import History, Snapshot

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.3, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_LABELS = ("model_name", "engine")


class Metrics:
    """Watches the engine's thread and tells Prometheus.

    Args:
        model_name: label of every metric.
        history: of the latest steps.
    """

    def __init__(self, model_name: str, history: History):
        self._registry = CollectorRegistry()
        self._values = (model_name, "0")
        self._collector = _SnapshotCollector(self._values, history)
        self._registry.register(self._collector)
        self._last_sec: dict[tuple[str, int], float] = {}
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival.")
        self._between = self._histogram("inter_token_latency_seconds", "Per token after the first.")
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "Of an answer.")
        self._prompt = self._histogram("request_prompt_tokens", "Per answer.", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Per answer.", _TOKENS)
        self._prompt_tokens = self._counter("prompt_tokens", "Of requests that ended.")
        self._queried = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hit = self._counter("prefix_cache_hits", "Prompt tokens found.")
        self._ended = Counter(
            "vllm:request_success",
            "Answers by finish reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )

    def saw_step(self, engine: Engine, deltas: Seq[Delta], seconds: float) -> None:
        now = time.perf_counter()
        for delta in deltas:
            if not delta.token_ids:
                continue
            answer = (delta.request_id, delta.index)
            before = self._last_sec.get(answer)
            if before is not None:
                each = (now - before) / len(delta.token_ids)
                for _ in delta.token_ids:
                    self._between.observe(each)
            self._last_sec[answer] = now

    def saw_end(self, output: RequestOutput) -> None:
        for answer in output.outputs:
            self._last_sec.pop((output.request_id, answer.index), None)
            metrics = answer.metrics
            if metrics.num_output_tokens:
                self._first_token.observe(metrics.time_to_first_token_sec)
            self._end_to_end.observe(metrics.total_sec)
            self._prompt.observe(metrics.num_prompt_tokens)
            self._output.observe(metrics.num_output_tokens)
            self._ended.labels(*self._values, answer.finish_reason).inc()
        first = output.outputs[0].metrics
        self._prompt_tokens.inc(first.num_prompt_tokens)
        self._queried.inc(first.num_prompt_tokens)
        self._hit.inc(first.num_cached_tokens)

    def render(self, snapshot: Snapshot) -> bytes:
        """The exposition format, of an engine as it is now."""
        self._collector.snapshot = snapshot
        return generate_latest(self._registry)

    def _histogram(self, name: str, about: str, buckets: Seq[float] = _SECONDS) -> Histogram:
        made = Histogram(
            f"vllm:{name}", about, _LABELS, buckets=tuple(buckets), registry=self._registry
        )
        return made.labels(*self._values)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"vllm:{name}", about, _LABELS, registry=self._registry).labels(
            *self._values
        )


class _SnapshotCollector(Collector):
    """What the engine itself counts, as of the latest snapshot."""

    def __init__(self, values: tuple[str, str], history: History):
        self.snapshot: Snapshot | None = None
        self._values = values
        self._history = history

    def collect(self) -> Iterator[Metric]:
        if self.snapshot is None:
            return
        stats, drafts = self.snapshot.stats, self.snapshot.drafts
        used = stats.num_used_blocks / self.snapshot.num_blocks
        yield self._gauge("vllm:num_requests_running", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", used)
        yield self._counter("vllm:num_preemptions", stats.num_preemptions)
        yield self._counter("vllm:generation_tokens", stats.num_output_tokens)
        yield self._counter("vllm:spec_decode_num_drafts", drafts.num_spec_steps)
        yield self._counter("vllm:spec_decode_num_draft_tokens", drafts.num_draft_tokens)
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", drafts.num_accepted_draft_tokens
        )
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "position",
            {depth - 1: count for depth, count in drafts.passed.items()},
        )
        yield self._counters("slipstream:passes", "gamma", drafts.sizes)
        yield self._counters("slipstream:steps", "reason", self.snapshot.reasons)
        rest = max(stats.total_sec - stats.draft_sec - stats.verify_sec, 0.0)
        yield self._counters(
            "slipstream:step_seconds",
            "part",
            {"draft": stats.draft_sec, "verify": stats.verify_sec, "rest": rest},
        )
        blocks = {
            "used": stats.num_used_blocks,
            "cached": stats.num_cached_blocks,
            "free": stats.num_free_blocks,
        }
        gauge = GaugeMetricFamily("slipstream:kv_blocks", "", labels=(*_LABELS, "state"))
        for state, count in blocks.items():
            gauge.add_metric((*self._values, state), count)
        yield gauge
        speedup = self._history.speedup()
        if speedup is not None:
            yield self._gauge("slipstream:estimated_speedup", speedup)

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, "", labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, value: float) -> Metric:
        family = CounterMetricFamily(name, "", labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counters(self, name: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = CounterMetricFamily(name, "", labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._values, str(key)), value)
        return family
