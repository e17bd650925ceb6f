#include "dispatch.h"

namespace dualkv {

std::string describe(const std::vector<int>& head_dims) {
  std::string text;
  for (int dim : head_dims) text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return text.empty() ? "none" : text;
}

}  // namespace dualkv
