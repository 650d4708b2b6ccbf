// Which kernels this processor runs, and how many threads this process may use.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace invar {

// Instruction sets that were compiled in and that this processor has, best first.
std::vector<std::string> available_isas();

// The kernel table of one instruction set. Throws std::invalid_argument naming the available ones.
const Kernels& kernels_for(const std::string& isa);

// The table of INVAR_ISA if that is set, else the best one. Read at every call: engines choose
// once.
const Kernels& kernels();

// Physical cores in the affinity mask, at most the cgroup's CPU quota rounded up; at least 1.
int usable_cores();

// Logical processors in the affinity mask.
int affinity_cpus();

}  // namespace invar
