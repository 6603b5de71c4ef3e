"""Every exception of the runtime, in one tree.

::

    DynamoException                       the genuine root; module ``dynamo._core``
    |-- Unknown, InvalidArgument, CannotConnect, Disconnected, ConnectionTimeout,
    |   Cancelled, EngineShutdown, StreamIncomplete, WorkerUnavailable,
    |   RouterQueueLimitExceeded, SelectionServiceError       handlers raise these
    |-- CallError                         a call failed; raised by the awaited call
    |   |-- NoInstances                   nobody to send the call to
    |   |   `-- NoInstancesInTime         (TimeoutError) nobody came while waiting
    |   |-- NoMatchInTime                 (TimeoutError) no instance with such data
    |   |-- InstanceNotFound              ``direct`` named an instance that is not there
    |   |-- ConnectionFailed              (ConnectionError) none to the worker, or lost
    |   |-- WorkerLost                    (ConnectionError) the worker left mid-call
    |   |-- CallTimeout                   (TimeoutError) a limit passed before the stream
    |   |-- Overloaded                    the worker is full; safe to send elsewhere
    |   |-- Refused                       the worker does not serve this endpoint (now)
    |   |-- HandlerRefused                the handler cannot be called like this
    |   |-- MessageTooLarge               refused before sending, or by the worker
    |   `-- StreamError                   (ValueError) raised while reading the stream
    |       |-- RemoteError               the handler raised
    |       |-- StreamBroken              (ConnectionError) the stream ended early
    |       `-- StreamTimeout             (TimeoutError) a limit passed in mid-stream
    |-- ProtocolError
    |   |-- LocalProtocolError            we were about to send rubbish
    |   `-- RemoteProtocolError           the peer sent rubbish
    |-- CannotListen                      a port could not be opened
    |-- DiscoveryError                    the discovery store refused or is away
    `-- RuntimeClosed                     the runtime was shut down (or forked)

``str(error)`` of what a call raises is the genuine text, ``Class: words``; every other
fact is an attribute.  The genuine classes keep exactly their genuine bases.
"""

from __future__ import annotations

__all__ = [
    "CallError",
    "CallTimeout",
    "Cancelled",
    "CannotConnect",
    "CannotListen",
    "ConnectionFailed",
    "ConnectionTimeout",
    "Disconnected",
    "DiscoveryError",
    "DynamoException",
    "EngineShutdown",
    "HandlerRefused",
    "InstanceNotFound",
    "InvalidArgument",
    "LocalProtocolError",
    "MessageTooLarge",
    "NoInstances",
    "NoInstancesInTime",
    "NoMatchInTime",
    "Overloaded",
    "ProtocolError",
    "Refused",
    "RemoteError",
    "RemoteProtocolError",
    "RouterQueueLimitExceeded",
    "RuntimeClosed",
    "SelectionServiceError",
    "StreamBroken",
    "StreamError",
    "StreamIncomplete",
    "StreamTimeout",
    "Unknown",
    "WorkerLost",
    "WorkerUnavailable",
]


class DynamoException(Exception):
    """Root of everything the runtime raises."""


class Unknown(DynamoException):
    """For handlers: a failure of no particular kind."""


class InvalidArgument(DynamoException):
    """For handlers: the request itself is wrong.  Reaches the caller as this class."""


class CannotConnect(DynamoException):
    """For handlers: something behind the handler could not be reached."""


class Disconnected(DynamoException):
    """For handlers: a connection behind the handler was lost."""


class ConnectionTimeout(DynamoException):
    """For handlers: something behind the handler did not answer in time."""


class Cancelled(DynamoException):
    """For handlers: the work was cancelled."""


class EngineShutdown(DynamoException):
    """For handlers: the engine is going down; callers avoid this instance for a while."""


class StreamIncomplete(DynamoException):
    """For handlers: the stream broke off; callers avoid this instance for a while."""


class WorkerUnavailable(DynamoException):
    """For handlers: this worker cannot serve; callers avoid it for a while."""


class RouterQueueLimitExceeded(DynamoException):
    """For handlers: a router's queue is full."""


class SelectionServiceError(DynamoException):
    """For handlers: no worker could be selected."""


_GENUINE = (
    DynamoException,
    Unknown,
    InvalidArgument,
    CannotConnect,
    Disconnected,
    ConnectionTimeout,
    Cancelled,
    EngineShutdown,
    StreamIncomplete,
    WorkerUnavailable,
    RouterQueueLimitExceeded,
    SelectionServiceError,
)
for _class in _GENUINE:
    # Code written against the genuine wheel compares and pickles by this name.
    _class.__module__ = "dynamo._core"


class CallError(DynamoException):
    """A call failed.  ``str()`` is ``Class: words``, the text of the genuine runtime.

    Attributes:
        error_class: The first word of the text, such as ``"Unavailable"``, or ``""``.
        phase: How far the call came: ``"choose"``, ``"connect"``, ``"send"``, ``"ack"``,
            ``"start"`` (acknowledged, no stream yet) or ``"stream"``.
        retryable: True if the handler certainly never saw the call.
        retry_after: Seconds after which the worker suggests another try, or None.
        instance_id: The instance that was called, or None if none was chosen.
        attempts: How many instances were tried.
        remote_type: Class name of the exception the handler raised, or None.
        remote_traceback: Its traceback as text, if the worker sent one.
        facts: Further facts by name; of who is there and left out, for example
            ``{"listed": 3, "withdrawn": {7: "Unavailable: bye"}, "ejected": {}, ...}``.
            After several attempts ``"tried"`` has a pair (instance id, text) for each
            that was given up; ``"retry_budget"`` is ``"spent"`` if that is why there
            was no other.  Where a limit in time passed, ``"limit"`` names it, the
            option of the call or the setting.

    Example:
        >>> error = CallError("Unavailable: gone", instance_id=7, retryable=True)
        >>> str(error), error.error_class, error.instance_id, error.retryable
        ('Unavailable: gone', 'Unavailable', 7, True)
    """

    phase: str = "choose"
    retryable: bool = False

    def __init__(
        self,
        text: str = "",
        *args: object,
        phase: str | None = None,
        retryable: bool | None = None,
        retry_after: float | None = None,
        instance_id: int | None = None,
        attempts: int = 1,
        remote_type: str | None = None,
        remote_traceback: str | None = None,
        facts: dict[str, object] | None = None,
    ) -> None:
        super().__init__(text, *args)
        if phase is not None:
            self.phase = phase
        if retryable is not None:
            self.retryable = retryable
        self.retry_after = retry_after
        self.instance_id = instance_id
        self.attempts = attempts
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback
        self.facts = facts or {}

    @property
    def error_class(self) -> str:
        """The class word in front of the colon, or an empty text."""
        head, colon, _ = str(self).partition(": ")
        return head if colon and head.isalpha() else ""


class NoInstances(CallError):
    """Nobody can be called: none listed, or all withdrawn; ``facts`` has who and why."""

    retryable = True


class NoInstancesInTime(NoInstances, TimeoutError):
    """Nobody that can be called appeared within the time given."""


class NoMatchInTime(CallError, TimeoutError):
    """The instances asked for did not appear in time; ``facts`` has who matched."""

    retryable = True


class InstanceNotFound(CallError):
    """``direct`` named an instance that discovery does not list."""

    retryable = True


class ConnectionFailed(CallError, ConnectionError):
    """No connection to the worker, or it was lost before the acknowledgement.

    In the second case the request may have been sent, and the handler may have run:
    then ``retryable`` is False.
    """

    phase = "connect"
    retryable = True


class WorkerLost(CallError, ConnectionError):
    """The worker left after the request was sent and before the stream began."""

    phase = "start"


class CallTimeout(CallError, TimeoutError):
    """A limit passed before the stream began; ``facts["limit"]`` and the text say which.

    Of the caller's own limits these are ``"timeout"``, ``"first_item_timeout"`` and
    ``"deadline"`` (that of the context, or of the handler that makes the call).
    """

    phase = "ack"


class Overloaded(CallError):
    """The worker refused the request before running it; safe to send again.

    Also, with the phase ``"choose"`` and without asking any, if all workers have lately
    asked to be left alone.  ``retry_after`` says for how long.
    """

    phase = "ack"
    retryable = True


class Refused(CallError):
    """The worker does not serve this endpoint, or no longer takes new work."""

    phase = "ack"
    retryable = True


class HandlerRefused(CallError):
    """The worker's handler cannot be called: wrong kind of callable or signature."""

    phase = "start"


class MessageTooLarge(CallError):
    """The request is over a size limit; the text names size, limit and setting."""

    phase = "send"


class StreamError(CallError, ValueError):
    """Raised while reading a response stream, after which the stream has ended."""

    phase = "stream"


class RemoteError(StreamError):
    """The handler raised; ``remote_type`` names the class.

    Never a TimeoutError or ConnectionError: those are about this call's own limits and
    connection, and a handler's trouble with its own peers must not look like them.
    """


class StreamBroken(StreamError, ConnectionError):
    """The stream ended before the worker said that it was complete."""


class StreamTimeout(StreamError, TimeoutError):
    """A limit of the caller passed while the stream was open; the call was ended.

    ``facts`` has the name of the ``"limit"`` (``"timeout"``, ``"first_item_timeout"``,
    ``"idle_timeout"`` or ``"deadline"``), its ``"seconds"``, and how many ``"items"`` had
    come.
    """


class ProtocolError(DynamoException):
    """Bytes that break the protocol."""


class LocalProtocolError(ProtocolError):
    """We were asked to send something the protocol cannot carry."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol does not allow."""


class CannotListen(DynamoException):
    """An address could not be listened on; the text names the settings."""


class DiscoveryError(DynamoException):
    """The discovery store refused an operation or could not be reached."""


class RuntimeClosed(DynamoException):
    """The runtime was shut down, or this is a forked child that may not use it."""
