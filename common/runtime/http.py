"""`/metrics`, `/healthz` and `/readyz` over HTTP, for Prometheus and for those who run the containers."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from troupe.common import system
from troupe.common.errors import ConfigError
from troupe.common.runtime import health

Probe = Callable[[], tuple[bool, str]]

CLIENT_S = 10.0
"""A connection holds a thread for this long at most, whatever its client sends or reads."""
MAX_CLIENTS = 32
"""Connections at a time. Beyond them the oldest is closed."""


class StatusServer:
    """Serves what the process has reported to `troupe.common.runtime.health`, from a thread of its own.

    `/healthz` answers 200 while the main loop is alive, `/readyz` 200 once the service does its work;
    otherwise 503 with a line that says why.
    """

    def __init__(
        self,
        service: str,
        port: int,
        *,
        host: str = "127.0.0.1",
        ready: Probe = health.ready,
    ) -> None:
        """Bind and start serving.

        Args:
            service: label of every metric.
            port: 0 picks a free one (see `port`).
            host: address to bind; loopback unless the operator says otherwise.
            ready: called for `/readyz`.

        Raises:
            ConfigError: the port is taken.
        """
        # A registry of its own: the library's global one collects whatever other packages register.
        registry = CollectorRegistry()
        registry.register(_Collector(service))
        ProcessCollector(registry=registry)
        probes = {"/healthz": health.healthy, "/readyz": ready}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
                elif probe := probes.get(path):
                    good, why = probe()
                    self._answer(200 if good else 503, f"{why}\n".encode(), "text/plain; charset=utf-8")
                else:
                    self._answer(404, b"try /metrics, /healthz or /readyz\n", "text/plain; charset=utf-8")

            def _answer(self, status: int, body: bytes, content_type: str) -> None:
                with contextlib.suppress(ConnectionError):  # who asked need not wait for the answer
                    self.send_response(status)
                    self.send_header("Content-Type", content_type)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Keep probes out of the log."""

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
            raise ConfigError(
                f"port {port} for metrics is in use; choose another net.metrics_port, or 0 to turn it off"
            ) from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="status-http", daemon=True).start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Serves each connection from a thread, and a new one at once however many silent ones there are."""

    # A client that is still connected must not keep the process from ending.
    daemon_threads = True
    request_queue_size = 128  # the default of 5 makes the kernel drop what comes while a thread starts

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, float] = {}  # since when, oldest first
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        with self._lock:
            self._open[request] = system.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that are too old, or too many: called after each new one, and twice a second."""
        latest_s = system.monotonic() - CLIENT_S
        with self._lock:
            excess = len(self._open) - MAX_CLIENTS
            old = [
                request
                for age, (request, since_s) in enumerate(self._open.items())
                if age < excess or since_s < latest_s
            ]
            for request in old:
                del self._open[request]
                with contextlib.suppress(OSError):  # its client has gone
                    # `shutdown` and not `close`: it wakes the thread, which then closes the socket itself.
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has been served."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that goes away in the middle is no news."""


class _Collector:
    """Shows to Prometheus what the process has reported. A name that ends in `_total` is a counter."""

    def __init__(self, service: str) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        for name, value in sorted(health.values().items()):
            stem = name.removesuffix("_total")
            kind = "gauge" if stem == name else "counter"
            # prometheus_client adds `_total` to a counter's name by itself.
            metric = Metric(prometheus_name(stem), f"last value of {name}", kind)
            metric.add_sample(prometheus_name(name), {"service": self._service}, float(value))
            yield metric
        for family in health.families():
            metric = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                metric.add_sample(sample.name, {"service": self._service, **sample.labels}, sample.value)
            yield metric


def prometheus_name(name: str) -> str:
    """Turn `replay/items` into `troupe_replay_items`."""
    return "troupe_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
