"""A small asynchronous client of etcd, and the state store on it. Nothing else imports etcd's stubs."""

from kvist.etcd.endpoints import EtcdEndpoints, EtcdOptions
from kvist.etcd.store import EtcdStore

__all__ = ["EtcdEndpoints", "EtcdOptions", "EtcdStore"]
