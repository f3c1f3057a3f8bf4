"""What goes wrong by a user's hand. Each message names the value and the fix.

Anything that is not a `SlipstreamError` is a bug of ours; the command line turns these into one
line and exit code 2.
"""


class SlipstreamError(Exception):
    """Base of every error a user can cause and cure."""


class ConfigError(SlipstreamError):
    """An engine or model setting that cannot work."""


class RequestError(SlipstreamError):
    """A prompt or sampling parameter that cannot be served."""


class ModelError(SlipstreamError):
    """A model file that is missing, damaged, or of a kind we do not run."""


class DownloadError(SlipstreamError):
    """No source could deliver a model."""
