"""How many devices a layout of ranks needs. Pure.

`nodes · devices = TP · PP · DP · PCP`; decode context parallelism uses the devices of tensor parallelism.
"""

from dataclasses import dataclass

from kvist.errors import invalid_field

_PATH = "engine_arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the kinds of parallelism.

    Attributes:
        tensor: `--tensor-parallel-size`.
        pipeline: `--pipeline-parallel-size`.
        data: `--data-parallel-size`.
        prefill_context: `--prefill-context-parallel-size`.
        decode_context: `--decode-context-parallel-size`.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    prefill_context: int = 1
    decode_context: int = 1

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.tensor * self.pipeline * self.data * self.prefill_context

    def check(self, *, present_devices: int | None) -> None:
        """Looks for what cannot run.

        Args:
            present_devices: Devices of all nodes; none where ranks need no devices of their own, as on a CPU.

        Raises:
            KvistError: `INVALID_ARGUMENT`, with both sides of what is not equal.
        """
        if self.prefill_context > 1 and self.data > 1:
            raise invalid_field(
                f"{_PATH}.prefill-context-parallel-size", "cannot be more than 1 together with data-parallel-size"
            )
        if self.prefill_context == 1:
            if self.tensor % self.decode_context:
                raise invalid_field(
                    f"{_PATH}.decode-context-parallel-size",
                    f"must divide tensor-parallel-size: {self.decode_context} does not divide {self.tensor}",
                )
        elif self.decode_context not in {1, self.prefill_context, self.tensor * self.prefill_context}:
            raise invalid_field(
                f"{_PATH}.decode-context-parallel-size",
                f"must be 1, {self.prefill_context} or {self.tensor * self.prefill_context}: the prefill context size, "
                "or that times the tensor size",
            )
        if present_devices is not None and present_devices != self.devices:
            raise invalid_field(
                f"{_PATH}.tensor-parallel-size",
                f"{present_devices} devices are there, and TP {self.tensor} x PP {self.pipeline} x DP {self.data} x "
                f"PCP {self.prefill_context} = {self.devices} are needed",
            )
