// What the three files of the fake NPU share.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <map>
#include <string>

namespace fake_npu {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;

// ---- the card (runtime.cpp)
int device_count(); // FAKE_NPU_COUNT
int current_device();
void set_device(int index);
void check_index(int index);
void set_soc(int number); // the number of the card's model, as torch_npu counts them; Python knows the names
bool second_generation(); // Ascend910B1 and later: bf16, fused attention, IEEE inf and nan
bool overflow_flag();     // of the first generation: an fp16 result went beyond 65504 since the last clearing
void set_overflow_flag(bool on);

// ---- memory (runtime.cpp)
struct MemStats {
  int64_t now = 0, peak = 0, allocated = 0, freed = 0;
};
MemStats mem_stats(int index);
void reset_peak(int index);
int64_t mem_total(); // FAKE_NPU_MEM_MB
// A device pointer that owns the host memory of a CPU result. Charges the device for it, or throws OutOfMemoryError.
c10::DataPtr adopt_host_memory(c10::Storage host, int index);

// ---- random numbers (runtime.cpp)
const at::Generator& default_generator(int index);
// A throw-away CPU generator made from (seed, offset) of `g`; moves the offset on, as a device's generator does.
at::Generator draw_cpu_generator(const at::Generator& g);

// ---- operators (ops.cpp)
at::Tensor host_view(const at::Tensor& t); // a CPU tensor over the same bytes as the npu tensor (no copy)
// First generation: brings the fp16 numbers of a host tensor back into range; raises the flag if `flag` and any was out.
void saturate(const at::Tensor& host, bool flag);
void set_strict(bool on);
void set_op_log(bool on);
std::map<std::string, int64_t> op_log();

} // namespace fake_npu
