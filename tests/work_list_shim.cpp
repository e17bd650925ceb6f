// The blocks that build work lists, run on the host.
#include "shim_problem.h"

#include "kernels/backward_list.h"
#include "kernels/forward_list.h"

using namespace dualkv;

extern "C" {

// {items, splits, slots} that the device's arrays hold, and {items} of the forward list.
void read_capacities(const Problem* p, int* out) {
  const BackwardCapacities most = p->capacities();
  out[0] = most.items, out[1] = most.splits, out[2] = most.slots;
  out[3] = forward_capacity(p->layout(), p->block_m);
}

// Steps of KV tile n_block of owner `index`, where groups come first.
int steps_of(const Problem* p, int index, int n_block) {
  const bool context = index < p->num_groups;
  GroupLayout layout = p->layout();
  layout.runs = {};
  if (n_block >= owned_tiles(layout, index, p->block_n)) return -1;
  const Owner owner = owner_of(layout, context ? Region::context : Region::decoded,
                               context ? index : index - p->num_groups, n_block, p->block_n);
  return owner_steps(layout, owner, p->block_m, p->heads, p->causal);
}

// Fills items (region, owner, n_block, first_step, num_steps, slot), splits (region, owner, n_block, slot, parts), the
// runs, and for every thread block its item, KV head and direction. Returns the number of items; {splits, parts, fillers,
// alternating} in `counts`.
int build_backward(const Problem* p, BackwardItem* items, SplitTile* splits, int* run_counts, int* run_begins, int* blocks,
                   int* counts) {
  const BackwardCapacities most = p->capacities();
  std::vector<int> offsets(p->num_groups + p->num_segments + 1), steps(most.tiles);
  BackwardOrder order{};
  BackwardListArgs args{};
  args.layout = p->layout();
  args.layout.runs = {run_counts, run_begins};
  args.run_counts = run_counts, args.run_begins = run_begins;
  args.block_m = p->block_m, args.block_n = p->block_n, args.causal = p->causal;
  args.num_kv_heads = p->num_kv_heads, args.heads_per_group = p->heads, args.num_sms = p->num_sms;
  args.tile_capacity = most.tiles, args.slot_capacity = most.slots;
  args.tile_offsets = offsets.data(), args.tile_steps = steps.data();
  args.items = items, args.order = &order, args.splits = splits, args.split_count = counts;
  host_cuda::run_block(kListThreads, [&] { build_backward_list(args); });
  const int count = order.begin[kCostClasses];
  for (int block = 0; block < count * p->num_kv_heads; ++block) {
    const BackwardPlace place = backward_place(block, order, p->num_kv_heads, p->num_sms);
    blocks[3 * block] = place.item, blocks[3 * block + 1] = place.kv_head, blocks[3 * block + 2] = place.reversed;
  }
  counts[1] = order.parts, counts[2] = order.fillers, counts[3] = order.alternating;
  return count;
}

// Fills items (segment, m_block) and their costs; returns their number.
int build_forward(const Problem* p, ForwardItem* items, int* costs) {
  std::vector<int> offsets(p->num_segments + 1);
  int counters[2] = {-1, -1};
  ForwardListArgs args{};
  args.layout = p->layout();
  args.block_m = p->block_m, args.block_n = p->block_n, args.causal = p->causal;
  args.capacity = forward_capacity(args.layout, p->block_m);
  args.tile_offsets = offsets.data(), args.items = items, args.count = counters, args.next = counters + 1;
  host_cuda::run_block(kListThreads, [&] { build_forward_list(args); });
  for (int i = 0; i < counters[0]; ++i) {
    costs[i] = forward_cost(args.layout.segment(items[i].segment), items[i].m_block, p->block_m, p->block_n, p->causal);
  }
  return counters[1] == 0 ? counters[0] : -1;
}

}  // extern "C"
