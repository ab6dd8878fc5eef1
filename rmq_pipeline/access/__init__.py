"""Who may do what at the doors of a broker: users, policies, and how a caller proves who it is."""

from rmq_pipeline.access.access import Access
from rmq_pipeline.access.resource import Action, Resource
from rmq_pipeline.access.user import Principal

__all__ = ["Access", "Action", "Principal", "Resource"]
