// The module ziggurat._core: the C++ library as Python sees it, under a package that makes it pleasant.
#include "python/module.hpp"

#include <nanobind/stl/string.h>

#include "ziggurat/base/log.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg::python {

DType dtype_named(const std::string& name) {
  for (const DType d : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI64, DType::kI32,
                        DType::kU16, DType::kU8}) {
    if (name == zg::name_of(d)) return d;
  }
  refuse("dtype", "\"" + name + "\" is none", "one of f64, f32, f16, bf16, i64, i32, u16, u8");
}

Tier memory_tier_named(const std::string& name) {
  if (name == "host") return Tier::kHost;
  if (name == "device") return Tier::kDevice;
  refuse("tier", "\"" + name + "\" is no tier whose bytes can be seen", "\"host\" or \"device\"");
}

Inside::Inside(const WithoutGil&, const std::shared_ptr<StoreHandle>& handle) : handle_(*handle) {
  handle_.owned.check_here("this store");
  lock_ = std::shared_lock(handle_.lock.mutex_);
  if (handle_.opened == nullptr) refuse("store", "is closed", "open another one");
}

const Tensor& Inside::tensor(TensorId tensor) const {
  const TensorTable& table = store().table();
  if (tensor < 0 || tensor >= table.tensor_count() || table.tensor(tensor).removed)
    refuse(fmt::format("tensor {}", tensor), "is not in the store", "it was removed");
  return table.tensor(tensor);
}

SegmentId Inside::segment(TensorId id, std::int32_t index) const {
  const Tensor& t = tensor(id);
  if (index < 0 || index >= t.segments)
    refuse(fmt::format("tensor \"{}\"", t.spec.name),
           fmt::format("has no segment {}, but {} of them", index, t.segments), "count from 0");
  return t.first_segment + index;
}

Alone::Alone(const WithoutGil&, StoreHandle& handle)
    : handle_(handle), lock_(handle.lock.mutex_, std::try_to_lock) {}

Alone::Alone(const WithoutGil&, const std::shared_ptr<StoreHandle>& handle, const char* call)
    : handle_(*handle) {
  handle_.owned.check_here("this store");
  lock_ = std::unique_lock(handle_.lock.mutex_, std::try_to_lock);
  if (!lock_.owns_lock())
    refuse(call, "another thread is inside a call with this store", "let it return first");
  if (handle_.opened == nullptr) refuse("store", "is closed", "open another one");
}

}  // namespace zg::python

NB_MODULE(_core, m) {
  using namespace zg::python;
  m.doc() = "The C++ library under the package ziggurat. Use the package, not this module.";
  bind_errors();
  m.attr("version") = ZG_VERSION_TEXT;
  m.def(
      "set_log_level",
      [](const char* level) {
        const std::string_view names[] = {"debug", "info", "warning", "error"};
        for (int i = 0; i < 4; ++i) {
          if (names[i] == level) return zg::log::set_level(static_cast<zg::log::Level>(i));
        }
        refuse("level", std::string("\"") + level + "\" is none", "debug, info, warning or error");
      },
      nb::arg("level"), "Log lines of this level and above go to stderr: debug, info, warning or error.");
  nb::class_<zg::io::Hash>(m, "Hash", "XXH3 of bytes that come in parts, as checkpoints have it.")
      .def(nb::init<>())
      .def(
          "update",
          [](zg::io::Hash& hash, std::uintptr_t address, std::int64_t bytes) {
            WithoutGil released;
            hash.update(reinterpret_cast<const void*>(address), bytes);
          },
          nb::arg("address"), nb::arg("bytes"))
      .def("text", [](const zg::io::Hash& hash) { return zg::io::hash_text(hash.value()); });
  bind_lease(m);
  bind_store(m);
  bind_optimizer(m);
  bind_measure(m);
}
