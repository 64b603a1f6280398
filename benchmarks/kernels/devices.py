"""GPUs that kernels are compiled for without having one."""

from __future__ import annotations

import dataclasses
from typing import Any

TEXT = """
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
gpu_device_info {{
  name: "{kind}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {cores}
  fpus_per_core: {fpus}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core}
  shared_memory_per_block_optin: {shared}
  registers_per_core_limit: {registers}
  registers_per_block_limit: 65536
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
  platform_version: "Compute Capability {major}.{minor}"
}}
"""


@dataclasses.dataclass(frozen=True)
class Device:
    """What a GPU says of itself.

    Attributes:
        kind: its name.
        cores: multiprocessors.
        capability: NVIDIA's compute capability.
        fpus: float32 units a multiprocessor.
        threads: most threads that reside on a multiprocessor.
        shared_kib: shared memory of a multiprocessor, of which a program may have 1 KiB less.
        l2_mib: second-level cache.
        clock: in GHz.
        bandwidth: of the memory, in GB/s.
        memory_gib: its size.
        registers: of a multiprocessor.
    """

    kind: str
    cores: int
    capability: tuple[int, int]
    fpus: int
    threads: int
    shared_kib: int
    l2_mib: int
    clock: float
    bandwidth: int
    memory_gib: int
    registers: int = 65536

    @property
    def target(self) -> Any:
        """The device as kernels see it."""
        # Here, since JAX reads the environment on import.
        from pallas_kernels._compat import Target

        return Target("gpu", self.kind, self.cores, self.capability)

    @property
    def architecture(self) -> str:
        """NVIDIA's name of it, as its assembler wants it."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def text(self) -> str:
        """Itself as XLA reads it."""
        major, minor = self.capability
        return TEXT.format(
            kind=self.kind,
            major=major,
            minor=minor,
            features="feature_extension: ACCELERATED_FEATURES" if major >= 9 else "",
            cores=self.cores,
            fpus=self.fpus,
            threads=self.threads,
            shared_per_core=1024 * self.shared_kib,
            shared=1024 * (self.shared_kib - 1),
            registers=self.registers,
            l2=self.l2_mib << 20,
            clock=self.clock,
            bandwidth=self.bandwidth * 10**9,
            memory=self.memory_gib << 30,
        )

    def resident(self, registers: int, shared: int, threads: int) -> int:
        """How many programs that need so much fit on one multiprocessor.

        Args:
            registers: of a thread; they are given out in eights.
            shared: bytes of shared memory; each program takes 1 KiB more.
            threads: of a program.
        """
        return min(
            self.registers // (-(-registers // 8) * 8 * threads),
            1024 * self.shared_kib // (shared + 1024),
            self.threads // threads,
        )


DEVICES = {
    "h200": Device("NVIDIA H200", 132, (9, 0), 128, 2048, 228, 50, 1.98, 4800, 141),
    "a100": Device("NVIDIA A100-SXM4-80GB", 108, (8, 0), 64, 2048, 164, 40, 1.41, 2039, 80),
    "a10": Device("NVIDIA A10", 72, (8, 6), 128, 1536, 100, 6, 1.695, 600, 24),
    "4090": Device("NVIDIA GeForce RTX 4090", 128, (8, 9), 128, 1536, 100, 72, 2.52, 1008, 24),
}
