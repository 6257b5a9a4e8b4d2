"""The OpenAI-compatible front door: routes, relays, and moves a live response from one instance to another.

A pure ASGI application. It imports no Django and touches no database: the routing table comes from Redis, notices about
streams come over one control connection per instance.
"""
