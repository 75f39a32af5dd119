"""The errors that users meet. Each message names the field or file, the value, and what is allowed."""


class HybridJaxError(Exception):
    """Base of every error that hybridjax raises on purpose."""


class ConfigError(HybridJaxError, ValueError):
    """A model, engine or experiment setting has a value that cannot work."""


class CheckpointError(HybridJaxError, ValueError):
    """A checkpoint directory is incomplete, inconsistent or of an unknown kind."""


class RequestError(HybridJaxError, ValueError):
    """A request cannot be served as asked. Becomes HTTP 400.

    Attributes:
      param: the request field at fault, None if no single one is.
      code: a short machine-readable word, for instance ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve. Becomes HTTP 404."""


class QueueFullError(HybridJaxError):
    """The engine takes no more requests for now. Becomes HTTP 503 with Retry-After.

    Attributes:
      retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, *, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class GrammarError(HybridJaxError):
    """A completion has come to where its grammar goes beyond a limit. Becomes HTTP 400."""


class EngineDeadError(HybridJaxError):
    """The engine has stopped (shut down, or a device error it could not survive)."""
