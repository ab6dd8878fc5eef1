"""Access control at the endpoints of a broker: users, policies and credentials."""

from rmq_pipeline.access.access import Access
from rmq_pipeline.access.policy import Action, Resource
from rmq_pipeline.access.users import Principal

__all__ = ["Access", "Action", "Principal", "Resource"]
