"""The search of each kind of scope."""

from tests.explore.ends import EndExplorer
from tests.explore.explorer import Explorer
from tests.explore.logs import LogExplorer
from tests.explore.scope import AnyScope, EndScope, LogScope


def explorer_of(scope: AnyScope) -> Explorer | LogExplorer | EndExplorer:
    """The search of a scope."""
    if isinstance(scope, LogScope):
        return LogExplorer(scope)
    return EndExplorer(scope) if isinstance(scope, EndScope) else Explorer(scope)
