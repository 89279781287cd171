// The card itself: devices, memory, streams, events and random numbers of the fake NPU.
#include "fake.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace fake_npu {
namespace {

int64_t env_int(const char* name, int64_t fallback) {
  const char* v = std::getenv(name);
  return v && *v ? std::atoll(v) : fallback;
}

constexpr int kMaxDevices = 16;
thread_local int tls_device = 0;
thread_local int64_t tls_stream[kMaxDevices] = {0};
std::atomic<int64_t> next_stream{1};
std::atomic<int> soc{-1};
std::atomic<bool> overflow{false};

std::mutex mem_mutex;
MemStats stats[kMaxDevices];

// NPU blocks are multiples of 512 bytes.
int64_t rounded(size_t n) { return static_cast<int64_t>((n + 511) / 512 * 512); }

// Check and charge are one step: two threads must not both get the last megabyte.
void charge(int index, int64_t bytes, size_t asked) {
  std::lock_guard<std::mutex> lock(mem_mutex);
  auto& s = stats[index];
  TORCH_CHECK_WITH(OutOfMemoryError, s.now + bytes <= mem_total(),
                   "NPU out of memory. Tried to allocate ", asked, " bytes (NPU ", index, "; ", mem_total(),
                   " bytes total capacity; ", s.now, " bytes already allocated) [fake]");
  s.now += bytes;
  s.allocated += bytes;
  s.peak = std::max(s.peak, s.now);
}

// What every device pointer carries: either bytes of its own or the storage of a CPU result.
struct Block {
  void* own = nullptr;
  c10::Storage host;
  int64_t bytes = 0;
  int index = 0;
};

void free_block(void* ctx) {
  auto* b = static_cast<Block*>(ctx);
  {
    std::lock_guard<std::mutex> lock(mem_mutex);
    stats[b->index].now -= b->bytes;
    stats[b->index].freed += b->bytes;
  }
  std::free(b->own);
  delete b;
}
void free_nothing(void*) {}

} // namespace

int device_count() {
  static int n = std::max<int64_t>(0, std::min<int64_t>(kMaxDevices, env_int("FAKE_NPU_COUNT", 2)));
  return n;
}
void check_index(int index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "invalid NPU device index ", index, ", there are ", device_count());
}
int current_device() { return tls_device; }
void set_device(int index) {
  check_index(index);
  tls_device = index;
}
void set_soc(int number) { soc = number; }
bool second_generation() { return soc >= 220; }
bool overflow_flag() { return overflow; }
void set_overflow_flag(bool on) { overflow = on; }

int64_t mem_total() {
  static int64_t n = env_int("FAKE_NPU_MEM_MB", 65536) << 20;
  return n;
}
MemStats mem_stats(int index) {
  check_index(index);
  std::lock_guard<std::mutex> lock(mem_mutex);
  return stats[index];
}
void reset_peak(int index) {
  check_index(index);
  std::lock_guard<std::mutex> lock(mem_mutex);
  stats[index].peak = stats[index].now;
}

c10::DataPtr adopt_host_memory(c10::Storage host, int index) {
  auto bytes = rounded(host.nbytes());
  charge(index, bytes, host.nbytes());
  void* p = host.mutable_data();
  return {p, new Block{nullptr, std::move(host), bytes, index}, &free_block, c10::Device(kNpu, index)};
}

// ---- allocator
struct FakeAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    int index = current_device();
    check_index(index);
    if (n == 0) return {nullptr, nullptr, &free_nothing, c10::Device(kNpu, index)};
    auto bytes = rounded(n);
    charge(index, bytes, n);
    auto* b = new Block{nullptr, {}, bytes, index};
    if (posix_memalign(&b->own, 512, bytes) != 0) {
      b->own = nullptr;
      free_block(b);
      TORCH_CHECK(false, "the host has no ", n, " bytes for the fake NPU");
    }
    static bool poison = env_int("FAKE_NPU_POISON", 0) != 0; // makes fresh memory nan, to find reads of unset memory
    if (poison) std::memset(b->own, 0xff, bytes);
    return {b->own, b, &free_block, c10::Device(kNpu, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dst, const void* src, std::size_t n) const override { std::memcpy(dst, src, n); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    auto s = mem_stats(index);
    c10::CachingDeviceAllocator::DeviceStats out;
    for (auto* kind : {&out.allocated_bytes, &out.reserved_bytes, &out.active_bytes, &out.requested_bytes}) {
      auto& all = (*kind)[0];
      all.current = s.now;
      all.peak = s.peak;
      all.allocated = s.allocated;
      all.freed = s.freed;
    }
    return out;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    check_index(index);
    std::lock_guard<std::mutex> lock(mem_mutex);
    stats[index].allocated = stats[index].freed = 0;
  }
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return {static_cast<size_t>(mem_total() - mem_stats(index).now), static_cast<size_t>(mem_total())};
  }
};
FakeAllocator fake_allocator;
REGISTER_ALLOCATOR(kNpu, &fake_allocator);

// ---- device guard: everything runs at once on the calling thread, so there is nothing to wait for
struct FakeEvent {
  std::chrono::steady_clock::time_point t;
};
struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {kNpu, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) set_device(d.index());
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index() && d.index() < kMaxDevices) tls_device = d.index();
  }
  c10::Stream make(c10::Device d, int64_t id) const {
    int i = d.has_index() ? d.index() : current_device();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, static_cast<c10::DeviceIndex>(i)), id);
  }
  c10::Stream getStream(c10::Device d) const override {
    return make(d, tls_stream[d.has_index() ? d.index() : current_device()]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return make(d, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return make(d, next_stream++); }
  c10::Stream getNewStream(c10::Device d, int) const override { return make(d, next_stream++); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    tls_stream[s.device().index()] = s.id();
    return old;
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<FakeEvent*>(e); }
  void record(void** e, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*e) *e = new FakeEvent();
    static_cast<FakeEvent*>(*e)->t = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    auto d = static_cast<FakeEvent*>(b)->t - static_cast<FakeEvent*>(a)->t;
    return std::chrono::duration<double, std::milli>(d).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard);

// ---- generator: its state is (seed, offset), 16 bytes, as on the card
struct FakeGenerator final : c10::GeneratorImpl {
  explicit FakeGenerator(int index)
      : c10::GeneratorImpl(c10::Device(kNpu, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t s) override {
    seed_ = s;
    offset_ = 0;
  }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& st) override {
    TORCH_CHECK(st.numel() == 16 && st.dtype() == caffe2::TypeMeta::Make<uint8_t>() && st.is_cpu(),
                "RNG state must be a CPU uint8 tensor of 16 bytes, got ", st.numel());
    auto* v = static_cast<const uint64_t*>(st.data());
    seed_ = v[0];
    offset_ = v[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte);
    auto* v = static_cast<uint64_t*>(t.mutable_data_ptr());
    v[0] = seed_;
    v[1] = offset_;
    return t.getIntrusivePtr();
  }
  FakeGenerator* clone_impl() const override {
    auto* g = new FakeGenerator(device().index());
    g->seed_ = seed_;
    g->offset_ = offset_;
    return g;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(int index) {
  static std::vector<at::Generator> gens = [] {
    std::vector<at::Generator> v;
    for (int i = 0; i < device_count(); ++i) v.push_back(at::make_generator<FakeGenerator>(i));
    return v;
  }();
  if (index < 0) index = current_device();
  check_index(index);
  return gens[index];
}
at::Generator draw_cpu_generator(const at::Generator& g) {
  auto& gen = const_cast<at::Generator&>(g);
  std::lock_guard<std::mutex> lock(gen.mutex());
  uint64_t x = gen.current_seed() * 0x9E3779B97F4A7C15ull ^ (gen.get_offset() + 0xD1B54A32D192ED03ull);
  x ^= x >> 31; x *= 0xBF58476D1CE4E5B9ull; x ^= x >> 29; x *= 0x94D049BB133111EBull; x ^= x >> 32;
  gen.set_offset(gen.get_offset() + 4);
  return at::detail::createCPUGenerator(x);
}

// ---- hooks
// Pinned memory is ordinary host memory that is remembered.
struct PinnedAllocator final : c10::Allocator {
  mutable std::mutex mutex;
  mutable std::map<const char*, size_t> blocks;

  static void release(void* context);
  c10::DataPtr allocate(size_t n) override {
    auto* data = static_cast<char*>(std::malloc(n ? n : 1));
    TORCH_CHECK(data, "no memory to pin");
    std::lock_guard<std::mutex> lock(mutex);
    blocks[data] = n ? n : 1;
    return {data, data, &release, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool has(const void* data) const {
    std::lock_guard<std::mutex> lock(mutex);
    auto next = blocks.upper_bound(static_cast<const char*>(data));
    return next != blocks.begin() && static_cast<const char*>(data) < (--next)->first + next->second;
  }
};

PinnedAllocator& pinned() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

void PinnedAllocator::release(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks.erase(static_cast<char*>(data));
  }
  std::free(data);
}

struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex i) const override { set_device(i); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override {
    auto old = current_device();
    set_device(i);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    int index = i < 0 ? current_device() : i;
    check_index(index);
    return at::make_generator<FakeGenerator>(index);
  }
  bool isPinnedPtr(const void* data) const override { return pinned().has(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  at::Device getDeviceFromPtr(void*) const override { return {kNpu, static_cast<c10::DeviceIndex>(current_device())}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto fresh = fake_allocator.allocate(n);
    auto keep = std::min<size_t>(n, impl->nbytes());
    if (keep) std::memcpy(fresh.get(), impl->data(), keep);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};
struct RegisterHooks {
  RegisterHooks() { at::RegisterPrivateUse1HooksInterface(new FakeHooks()); }
} register_hooks;

} // namespace fake_npu
