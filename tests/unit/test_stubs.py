"""The generated stubs load together, and describe the services that the design names."""

import importlib

import pytest

SERVICES = {
    "agent": ("agent", "AgentService"),
    "controller": ("controller", "ControllerService"),
    "engine": ("engine", "EngineService"),
    "kvmaster": ("kvmaster", "KvMasterService"),
    "router": ("router", "RouterService"),
}


@pytest.mark.parametrize("area", SERVICES)
def test_each_service_has_a_stub_and_a_servicer(area: str) -> None:
    file, service = SERVICES[area]
    grpc_module = importlib.import_module(f"kvist.{area}.v1.{file}_pb2_grpc")
    messages = importlib.import_module(f"kvist.{area}.v1.{file}_pb2")
    assert f"kvist.{area}.v1" == messages.DESCRIPTOR.package
    methods = {method.name for method in messages.DESCRIPTOR.services_by_name[service].methods}
    servicer = getattr(grpc_module, f"{service}Servicer")
    assert methods == {name for name in vars(servicer) if not name.startswith("_")}


def test_each_rpc_has_its_own_messages() -> None:
    seen: dict[str, str] = {}
    for area, (file, service) in SERVICES.items():
        messages = importlib.import_module(f"kvist.{area}.v1.{file}_pb2")
        for method in messages.DESCRIPTOR.services_by_name[service].methods:
            for message in (method.input_type.full_name, method.output_type.full_name):
                assert message not in seen, f"{message} serves {seen.get(message)} and {method.full_name}"
                seen[message] = method.full_name
