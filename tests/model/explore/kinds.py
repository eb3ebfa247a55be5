"""The search of each kind of scope."""

from tests.model.explore.ends import EndExplorer
from tests.model.explore.explorer import Explorer
from tests.model.explore.logs import LogExplorer
from tests.model.explore.rewrites import RewriteExplorer
from tests.model.explore.scope import AnyScope, EndScope, LogScope, RewriteScope


def explorer_of(scope: AnyScope) -> Explorer | LogExplorer | EndExplorer:
    """The search of a scope."""
    if isinstance(scope, RewriteScope):
        return RewriteExplorer(scope)
    if isinstance(scope, LogScope):
        return LogExplorer(scope)
    return EndExplorer(scope) if isinstance(scope, EndScope) else Explorer(scope)
