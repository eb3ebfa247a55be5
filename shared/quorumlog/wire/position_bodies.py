"""The cluster's own logs, and the formats of their rows: consumers' positions, work queues, and
subscriptions of streams.
"""

from typing import Final, get_args

from quorumlog.protocol import positions, queue_requests, subscriptions
from quorumlog.protocol.queue_state import Queue
from quorumlog.wire.row_bodies import RowBodies

POSITIONS_LOG: Final = "quorumlog.positions"
QUEUES_LOG: Final = "quorumlog.queues"
SUBSCRIPTIONS_LOG: Final = "quorumlog.subscriptions"
OWN_LOGS: Final = frozenset((POSITIONS_LOG, QUEUES_LOG, SUBSCRIPTIONS_LOG))
"""Reserved names of logs, which no client's request may use."""

POSITION_BODIES: Final = RowBodies(POSITIONS_LOG, positions.Position, get_args(positions.Request))
QUEUE_BODIES: Final = RowBodies(
    QUEUES_LOG,
    Queue,
    get_args(queue_requests.QueueRequest),
    (queue_requests.Taken, queue_requests.Settled),
)
SUBSCRIPTION_BODIES: Final = RowBodies(
    SUBSCRIPTIONS_LOG, subscriptions.Subscription, get_args(subscriptions.SubscriptionRequest)
)
