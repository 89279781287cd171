// Operators of the fake NPU: a few kernels of its own, a boxed fallback that runs the CPU kernel on the same bytes for
// all others, fused attention and autocast.
#include "fake.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/nan_to_num.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <set>

// Declared here because the header they come from, ATen/autocast_mode.h, includes every operator of torch.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, DeviceType device_type);
} // namespace at::autocast

namespace fake_npu {
namespace {

using c10::IValue;
using Names = std::set<std::string>;

std::atomic<bool> strict{true};
std::atomic<bool> logging{false};
std::mutex log_mutex;
std::map<std::string, int64_t> counts;

void log_op(const std::string& name) {
  if (!logging.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> lock(log_mutex);
  counts[name] += 1;
}

// ---- tensors over the bytes of other tensors
c10::Storage new_storage(c10::DataPtr p, size_t bytes, c10::Allocator* allocator) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(p),
                                                            allocator, true));
}

// A CPU storage over the bytes of an npu storage; keeps the latter alive.
c10::Storage host_storage(const c10::Storage& dev) {
  auto* keep = new c10::Storage(dev);
  c10::DataPtr p(dev.mutable_data(), keep, [](void* s) { delete static_cast<c10::Storage*>(s); }, c10::Device(c10::kCPU));
  return new_storage(std::move(p), dev.nbytes(), c10::GetCPUAllocator());
}

c10::Storage device_storage(const c10::Storage& host, int index) {
  size_t n = host.nbytes();
  return new_storage(n ? adopt_host_memory(host, index) : c10::DataPtr(nullptr, c10::Device(kNpu, index)), n,
                     c10::GetAllocator(kNpu));
}

// The keys an ordinary (not inference) tensor of that backend carries.
c10::DispatchKeySet ordinary_keys(c10::DispatchKey key) {
  auto bit = key == c10::DispatchKey::CPU ? c10::BackendComponent::CPUBit : c10::BackendComponent::PrivateUse1Bit;
  return c10::DispatchKeySet(key) | c10::getAutogradRelatedKeySetFromBackend(bit) |
      c10::getAutocastRelatedKeySetFromBackend(bit);
}

// A tensor with the shape and dtype of `like` on another storage. Whether it is an inference tensor follows `like`, not
// the mode of the moment: a view of an ordinary tensor stays ordinary under torch.inference_mode().
at::Tensor with_storage(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto out = like.is_inference()
      ? at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype())
      : at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), ordinary_keys(key),
                                                 like.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return out;
}

at::Tensor to_device(const at::Tensor& host, int index) {
  return with_storage(host, device_storage(host.storage(), index), c10::DispatchKey::PrivateUse1);
}

// ---- what the card refuses or does in its own way, by operator
// "aten::add_.Tensor" -> "add"
std::string base_name(const std::string& name) {
  auto base = name.substr(name.find("::") + 2);
  base = base.substr(0, base.find('.'));
  if (base.size() > 1 && base.back() == '_') base.pop_back();
  return base;
}

// Indexing takes CPU indices.
const Names kTakesCpuArray = {"index", "index_put", "_index_put_impl"};

// These take a 0-dim CPU tensor as a number; the others hand it to the device library, which refuses it.
const Names kTakesCpuScalar = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "fmod", "remainder", "pow", "atan2",
    "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor", "eq", "ne", "lt", "le",
    "gt", "ge", "maximum", "minimum", "max", "min", "where", "fill", "masked_fill", "index_put", "_index_put_impl",
    "bernoulli", "index", "_foreach_add", "_foreach_mul", "_foreach_div"};

const Names kRefusesDouble = {"mm", "addmm", "bmm", "baddbmm", "_softmax", "_log_softmax", "native_layer_norm"};

// No arithmetic on the elements: a card without bf16 has these all the same.
const Names kMovesBytes = {"resize", "zero", "_local_scalar_dense"};

// These bring a given inf into range (a mask of -inf becomes -65504) but compute nothing that could overflow.
const Names kPlacesNumbers = {"fill", "where", "masked_fill", "index_put", "_index_put_impl", "cat", "index", "index_select",
                              "gather", "embedding", "tril", "triu"};

// ---- the fallback
struct Call {
  std::string name;
  int index = -1; // npu index of this call
  bool no_bf16 = false;
  bool saw_cpu_array = false, saw_cpu_scalar = false;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages; // (device, host)
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;      // (device, host)

  bool among(const Names& names) const { return names.count(base_name(name)) > 0; }
  void see_device(int i) {
    if (index < 0) index = i;
    TORCH_CHECK(index == i, "Expected all tensors to be on the same device, but found at least two devices, npu:",
                index, " and npu:", i, "! (", name, ")");
  }
  void check_bf16(const at::Tensor& t) const {
    TORCH_CHECK(!no_bf16 || t.scalar_type() != at::kBFloat16, name,
                " is not supported on this NPU for dtype DT_BFLOAT16: cards before Ascend910B1 have none [fake strict mode]");
  }
  at::Tensor in(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (t.device().type() != kNpu) {
      if (t.device().is_cpu() && t.dim() > 0) saw_cpu_array = true;
      if (t.device().is_cpu() && t.dim() == 0 && !t.unsafeGetTensorImpl()->is_wrapped_number()) saw_cpu_scalar = true;
      return t;
    }
    see_device(t.device().index());
    for (auto& p : tensors)
      if (p.first.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return p.second;
    TORCH_CHECK(!strict || t.scalar_type() != at::kDouble || !among(kRefusesDouble), name,
                " is not supported on NPU for dtype DT_DOUBLE [fake strict mode]");
    check_bf16(t);
    auto* s = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    c10::Storage host;
    for (auto& p : storages)
      if (p.first.unsafeGetStorageImpl() == s) host = p.second;
    if (!host) {
      host = host_storage(t.storage());
      storages.emplace_back(t.storage(), host);
    }
    auto h = with_storage(t, host, c10::DispatchKey::CPU);
    tensors.emplace_back(t, h);
    return h;
  }
  at::Tensor out(const at::Tensor& h) {
    if (!h.defined() || !h.device().is_cpu() || h.layout() != at::kStrided) return h;
    for (auto& p : tensors)
      if (p.second.unsafeGetTensorImpl() == h.unsafeGetTensorImpl()) return p.first;
    auto* s = h.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    for (auto& p : storages)
      if (p.second.unsafeGetStorageImpl() == s) return with_storage(h, p.first, c10::DispatchKey::PrivateUse1);
    check_bf16(h);
    auto dev = device_storage(h.storage(), index);
    storages.emplace_back(dev, h.storage()); // two outputs may share one storage
    return with_storage(h, dev, c10::DispatchKey::PrivateUse1);
  }
  // The kernel may have grown a storage or reshaped a tensor (out= and resize_).
  void write_back() {
    for (auto& [dev, host] : storages) {
      auto* d = dev.unsafeGetStorageImpl();
      auto* h = host.unsafeGetStorageImpl();
      if (d->data() == h->data()) continue;
      auto bytes = h->nbytes();
      auto moved = new_storage(h->set_data_ptr(c10::DataPtr(nullptr, c10::kCPU)), bytes, c10::GetCPUAllocator());
      d->set_data_ptr_noswap(adopt_host_memory(std::move(moved), index)); // when it throws, `d` is as it was
      d->set_nbytes(bytes);
      h->set_data_ptr_noswap(c10::DataPtr(d->mutable_data(), c10::kCPU)); // keeps the host view usable for out()
    }
    for (auto& [d, h] : tensors)
      if (d.sizes() != h.sizes() || d.strides() != h.strides() || d.storage_offset() != h.storage_offset())
        d.unsafeGetTensorImpl()->set_sizes_and_strides(h.sizes(), h.strides(), h.storage_offset());
  }
};

// Puts f(tensor) in place of every tensor of a value.
template <typename F>
IValue map_tensors(const IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const auto& t : v.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
      out.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return out;
  }
  return v;
}

bool is_generator(const c10::Argument& a) {
  auto t = a.type();
  if (auto o = t->cast<c10::OptionalType>()) t = o->getElementType();
  return t->kind() == c10::TypeKind::GeneratorType;
}
bool is_view(const c10::Argument& ret) { return ret.alias_info() && !ret.alias_info()->isWrite(); }

void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& args = schema.arguments();
  const auto& rets = schema.returns();
  Call call;
  call.name = op.operator_name().name;
  if (!op.operator_name().overload_name.empty()) call.name += "." + op.operator_name().overload_name;
  log_op(call.name);
  static const char* refused = std::getenv("FAKE_NPU_REFUSE");  // one operator that this "card" does not have
  TORCH_CHECK(!refused || call.name.rfind(refused, 0) != 0, call.name, ": not implemented on this NPU [fake]");
  const bool old_card = !second_generation();
  call.no_bf16 = old_card && strict && !(rets.size() == 1 && is_view(rets[0])) && !call.among(kMovesBytes);

  const size_t base = stack->size() - args.size();
  std::vector<IValue> written; // of an old card: arguments and results whose numbers must be looked at
  for (size_t i = 0; i < args.size(); ++i) {
    auto& v = (*stack)[base + i];
    if (v.isDevice() && v.toDevice().type() == kNpu) {
      call.see_device(v.toDevice().has_index() ? v.toDevice().index() : current_device());
      v = IValue(c10::Device(c10::kCPU));
    } else {
      v = map_tensors(v, [&](const at::Tensor& t) { return call.in(t); });
    }
    if (old_card && args[i].alias_info() && args[i].alias_info()->isWrite()) written.push_back(v);
  }
  if (call.index < 0) call.index = current_device();
  check_index(call.index);
  if (strict && !call.tensors.empty()) {
    TORCH_CHECK(!call.saw_cpu_array || call.among(kTakesCpuArray),
                "Expected all tensors to be on the same device, but found at least two devices, npu:", call.index,
                " and cpu! (when checking arguments of ", call.name, ")");
    TORCH_CHECK(!call.saw_cpu_scalar || call.among(kTakesCpuScalar),
                "Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input "
                "tensor device is correct. (a 0-dim CPU tensor given to ", call.name, ") [fake strict mode]");
    if (call.name.rfind("aten::lerp", 0) == 0) // the NPU kernel wants one dtype for all three
      for (auto& p : call.tensors)
        TORCH_CHECK(p.first.scalar_type() == call.tensors[0].first.scalar_type(), call.name,
                    ": self, end and weight must have one dtype on NPU [fake strict mode]");
  }
  for (size_t i = 0; i < args.size(); ++i) {
    if (!is_generator(args[i])) continue;
    auto& v = (*stack)[base + i];
    auto g = v.isNone() ? default_generator(call.index) : v.toGenerator();
    TORCH_CHECK(g.device().type() == kNpu, "Expected a 'npu' device type for generator but found '", g.device().type(), "'");
    v = IValue(draw_cpu_generator(g));
  }

  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (old_card) {
    for (size_t i = 0; i < rets.size(); ++i)
      if (!rets[i].alias_info()) written.push_back((*stack)[base + i]);
    const bool flag = !call.among(kPlacesNumbers);
    for (auto& v : written) map_tensors(v, [&](const at::Tensor& t) { return saturate(t, flag), t; });
  }
  call.write_back();
  for (size_t i = base; i < stack->size(); ++i)
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& t) { return call.out(t); });
}

// ---- kernels of its own
c10::Device resolve(std::optional<c10::Device> d) {
  int i = d && d->has_index() ? d->index() : current_device();
  check_index(i);
  return {kNpu, static_cast<c10::DeviceIndex>(i)};
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<c10::Device> device, std::optional<bool> pin,
                               std::optional<at::MemoryFormat> format) {
  log_op("aten::empty.memory_format");
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_generic(size, c10::GetAllocator(kNpu), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  log_op("aten::empty_strided");
  c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kNpu),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool) {
  log_op("aten::_copy_from");
  auto s = src.device().type() == kNpu ? host_view(src) : src;
  auto d = dst.device().type() == kNpu ? host_view(dst) : dst;
  at::AutoDispatchBelowADInplaceOrView below;
  d.copy_(s);
  if (s.scalar_type() != d.scalar_type() && dst.device().type() == kNpu) saturate(d, true); // bytes that only move stay
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}
at::Tensor& set_storage_offset(at::Tensor& self, c10::Storage src, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  log_op("aten::set_.source_Storage_storage_offset");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(src));
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  size_t need = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(), offset);
  auto* st = impl->unsafe_storage().unsafeGetStorageImpl();
  if (self.numel() > 0 && need > st->nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, c10::Storage src) {
  int64_t n = static_cast<int64_t>(src.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(src), 0, {n}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& src) {
  return set_storage_offset(self, src.storage(), src.storage_offset(), src.sizes(), src.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  auto none = new_storage(c10::DataPtr(nullptr, self.device()), 0, c10::GetAllocator(kNpu));
  return set_storage_offset(self, std::move(none), 0, {0}, {1});
}
void record_stream(at::Tensor&, c10::Stream) {}

// ---- fused attention: on the same condition as the card's, and like it without a (T, T) matrix in device memory
int64_t sdp_choice(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                   double dropout, bool is_causal, std::optional<double>, bool gqa) {
  const bool masked = mask && mask->defined();
  TORCH_CHECK(!(masked && is_causal), "Explicit attn_mask should not be set when is_causal=True");
  auto type = q.scalar_type();
  bool fused = second_generation() && dropout == 0.0 && q.dim() == 4 && k.dim() == 4 && v.dim() == 4 &&
      (type == at::kFloat || type == at::kHalf || type == at::kBFloat16) && k.scalar_type() == type &&
      v.scalar_type() == type && (!masked || (mask->scalar_type() == at::kBool && (mask->dim() == 2 || mask->dim() == 4))) &&
      q.numel() > 0 && k.numel() > 0 && q.size(0) == k.size(0) && k.size(1) == v.size(1) && k.size(1) > 0 &&
      (q.size(1) == k.size(1) || (gqa && q.size(1) % k.size(1) == 0)) && q.size(3) == k.size(3) && q.size(3) == v.size(3) &&
      q.size(3) <= 512;
  return static_cast<int64_t>(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

// The CPU kernels want neighbours in the last dimension and as many heads of k and v as of q.
at::Tensor for_flash(const at::Tensor& t, int64_t heads) {
  auto h = host_view(t);
  if (h.stride(-1) != 1) h = h.contiguous();
  if (h.size(1) != heads) h = h.repeat_interleave(heads / h.size(1), 1);
  return h;
}
std::optional<at::Tensor> host_mask(const std::optional<at::Tensor>& mask) {
  return mask && mask->defined() ? std::optional<at::Tensor>(host_view(*mask)) : std::nullopt;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                double dropout, bool is_causal, bool, std::optional<double> scale) {
  log_op("aten::_scaled_dot_product_fused_attention_overrideable");
  at::AutoDispatchBelowADInplaceOrView below;
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      for_flash(q, q.size(1)), for_flash(k, q.size(1)), for_flash(v, q.size(1)), dropout, is_causal, host_mask(mask), scale);
  int i = q.device().index();
  return {to_device(out, i), to_device(lse, i), {}, {}, q.size(2), k.size(2), {}, {}, {}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fused_attention_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
    std::array<bool, 4> wanted, const at::Tensor& out, const at::Tensor& lse, const at::Tensor&, const at::Tensor&,
    c10::SymInt, c10::SymInt, double dropout, bool is_causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  log_op("aten::_scaled_dot_product_fused_attention_overrideable_backward");
  TORCH_CHECK(!wanted[3], "fused attention has no gradient for its mask");
  at::AutoDispatchBelowADInplaceOrView below;
  auto [gq, gk, gv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      for_flash(grad, q.size(1)), for_flash(q, q.size(1)), for_flash(k, q.size(1)), for_flash(v, q.size(1)), host_view(out),
      host_view(lse), dropout, is_causal, host_mask(mask), scale);
  auto dev = [&](const at::Tensor& g, int64_t heads, bool want) {
    if (!want) return at::Tensor();
    auto sum = g.size(1) == heads ? g : g.unflatten(1, {heads, g.size(1) / heads}).sum(2);
    return to_device(sum, q.device().index());
  };
  return {dev(gq, q.size(1), wanted[0]), dev(gk, k.size(1), wanted[1]), dev(gv, v.size(1), wanted[2]), {}};
}

} // namespace

at::Tensor host_view(const at::Tensor& t) { return with_storage(t, host_storage(t.storage()), c10::DispatchKey::CPU); }

void saturate(const at::Tensor& host, bool flag) {
  if (second_generation() || !host.defined() || host.scalar_type() != at::kHalf || host.numel() == 0) return;
  auto fixed = at::nan_to_num(host, 0.0, 65504.0, -65504.0);
  if (at::equal(fixed, host)) return;
  host.copy_(fixed);
  if (flag) set_overflow_flag(true);
}

void set_strict(bool on) { strict = on; }
void set_op_log(bool on) {
  std::lock_guard<std::mutex> lock(log_mutex);
  if (on) counts.clear();
  logging = on;
}
std::map<std::string, int64_t> op_log() {
  std::lock_guard<std::mutex> lock(log_mutex);
  return counts;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &fused_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &fused_attention_backward);
}

// ---- autocast: the lists of CUDA less rms_norm, which the NPU leaves alone, and less what no GPT has
enum class Cast { low, fp32, dtype_argument, widest };

bool may_cast(const at::Tensor& t) {
  return t.defined() && t.device().type() == kNpu && t.is_floating_point() && t.scalar_type() != at::kDouble;
}

// One boxed kernel for each policy; torch's own templates, one for each operator, compile much longer.
template <Cast policy>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  const auto& args = op.schema().arguments();
  const size_t base = stack->size() - args.size();
  if (policy == Cast::dtype_argument) {
    auto& first = (*stack)[base];
    if (first.isTensor() && may_cast(first.toTensor()))
      for (size_t i = 0; i < args.size(); ++i)
        if (args[i].name() == "dtype" && (*stack)[base + i].isNone())
          (*stack)[base + i] = IValue(static_cast<int64_t>(at::kFloat));
    return op.callBoxed(stack);
  }
  auto to = policy == Cast::fp32 ? at::kFloat : at::autocast::get_autocast_dtype(kNpu);
  if (policy == Cast::widest)
    for (size_t i = base; i < stack->size(); ++i)
      map_tensors((*stack)[i], [&](const at::Tensor& t) {
        if (may_cast(t) && t.scalar_type() == at::kFloat) to = at::kFloat;
        return t;
      });
  for (size_t i = base; i < stack->size(); ++i)
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& t) { return at::autocast::cached_cast(to, t, kNpu); });
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : {"addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm",
                           "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "scaled_dot_product_attention", "prelu"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::low>>());
  for (const char* name : {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
                           "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
                           "layer_norm", "native_layer_norm", "cosine_similarity", "nll_loss", "nll_loss2d", "kl_div",
                           "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "binary_cross_entropy_with_logits", "dist",
                           "cdist", "logsumexp"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::fp32>>());
  for (const char* name : {"prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
                           "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
                           "sum.dim_IntList"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::dtype_argument>>());
  for (const char* name : {"addcdiv", "addcmul", "atan2", "cross", "dot", "index_put", "tensordot", "scatter_add"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::widest>>());
}

} // namespace fake_npu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fake_npu::sdp_choice)
} // namespace at::native
