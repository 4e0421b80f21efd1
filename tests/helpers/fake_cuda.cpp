// Has autograd take tensors of device `cuda` for an accelerator's on a build of PyTorch without CUDA: a device guard and
// hooks that do nothing. fake_cuda.py builds this and calls `install` and `uninstall`.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

thread_local DeviceIndex current = 0;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(c10::kCUDA, current); }
  void setDevice(Device device) const override {
    if (device.has_index()) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return 2; }
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface), "one takes the other's place in memory");

// ATen asks for hooks once and keeps them, so that others have to take their place.
template <class Kind>
void replace_hooks() {
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Kind();
}

}  // namespace

extern "C" void install() {
  static Guard guard;
  c10::impl::registerDeviceGuard(c10::kCUDA, &guard);
  replace_hooks<Hooks>();
}

extern "C" void uninstall() {
  replace_hooks<at::CUDAHooksInterface>();
  c10::impl::registerDeviceGuard(c10::kCUDA, nullptr);
}
