#include "runtime/cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif

namespace invar {
namespace {

const Kernels kPortable{"portable", &portable::linear_kernels, &portable::row_kernels,
                        portable::attention_kernels, &portable::sampling_kernels};
#if defined(INVAR_X86)
const Kernels kAvx2{"avx2", &avx2::linear_kernels, &avx2::row_kernels, avx2::attention_kernels,
                    &avx2::sampling_kernels};
const Kernels kAvx512{"avx512", &avx512::linear_kernels, &avx512::row_kernels,
                      avx512::attention_kernels, &avx512::sampling_kernels};

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
#if defined(INVAR_EMULATED)  // INVAR_EMULATE_AVX512: the kernels need no such CPU
  return has_avx2();
#endif
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
#endif

std::vector<const Kernels*> available_tables() {
  std::vector<const Kernels*> tables;
#if defined(INVAR_X86)
  if (has_avx512()) tables.push_back(&kAvx512);
  if (has_avx2()) tables.push_back(&kAvx2);
#endif
  tables.push_back(&kPortable);
  return tables;
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "quota period" or "max period" in processors; infinity where there is no quota.
double quota_of(const std::string& line) {
  std::istringstream fields(line);
  std::string quota;
  double period = 0;
  if (!(fields >> quota >> period) || quota == "max" || period <= 0) return HUGE_VAL;
  return std::atof(quota.c_str()) / period;
}

// The smallest quota of the process's cgroup and those above it (version 2), or version 1's.
double cgroup_cpus() {
  const std::string root = "/sys/fs/cgroup";
  double cpus = quota_of(first_line(root + "/cpu.max"));
  std::string group = first_line("/proc/self/cgroup");  // "0::/a/b"
  group = group.rfind("0::/", 0) == 0 ? group.substr(3) : "";
  while (group.size() > 1) {
    cpus = std::min(cpus, quota_of(first_line(root + group + "/cpu.max")));
    group.resize(group.rfind('/'));
  }
  const std::string v1 = root + "/cpu/cpu.cfs_";
  const std::string quota = first_line(v1 + "quota_us");
  if (!quota.empty() && quota[0] != '-') {  // -1: none
    cpus = std::min(cpus, quota_of(quota + " " + first_line(v1 + "period_us")));
  }
  return cpus;
}

std::vector<int> affinity() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
#endif
  if (cpus.empty()) {
    const int count = std::max(1u, std::thread::hardware_concurrency());
    for (int cpu = 0; cpu < count; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

int physical_cores(const std::vector<int>& cpus) {
  std::set<std::pair<std::string, std::string>> cores;
  for (int cpu : cpus) {
    const std::string topology = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const std::string core = first_line(topology + "core_id");
    if (core.empty()) return static_cast<int>(cpus.size());  // no topology: count every processor
    cores.emplace(first_line(topology + "physical_package_id"), core);
  }
  return static_cast<int>(cores.size());
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* table : available_tables()) names.emplace_back(table->isa);
  return names;
}

const Kernels& kernels_for(const std::string& isa) {
  std::string names;
  for (const Kernels* table : available_tables()) {
    if (isa == table->isa) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->isa);
  }
  throw std::invalid_argument("instruction set '" + isa +
                              "' is not available here (available: " + names + ")");
}

const Kernels& kernels() {
  const char* isa = std::getenv("INVAR_ISA");
  if (isa == nullptr || *isa == '\0') return *available_tables().front();
  try {
    return kernels_for(isa);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("INVAR_ISA: ") + error.what());
  }
}

int affinity_cpus() { return static_cast<int>(affinity().size()); }

int usable_cores() {
  const int cores = physical_cores(affinity());
  const double quota = std::ceil(cgroup_cpus());
  return std::max(1, quota < cores ? static_cast<int>(quota) : cores);
}

}  // namespace invar
