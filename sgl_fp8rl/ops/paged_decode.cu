// Attention of decode steps over a paged KV cache of 8-bit codes: products in FP16, sums in FP32; K's INT8 codes multiply
// q's two bytes as integers, exactly.
// Memory bounds it: bytes are read once, and about a third of the issue slots convert and multiply.
//
// Work is cut by context alone, where its plan fits the workspace: a split is SPLIT tokens of a sequence, counted from
// its start, and an item is a split of one KV head. Items lie in rows of one for each block, the longest first. Blocks
// take rows there and back, so that none has the longest of every row. A block's four warps take the tiles of an item in
// turn, keep their own softmax and copy ahead, over the borders of items; then each merges a part of the four.
// merge_splits merges splits in their order. So an output depends on no other sequence of the batch.
//
// BLOCKED, where registers cannot hold all columns, an item is also of BLOCK_COLUMNS of them. Items of the same codes are
// side by side, so other blocks take them at the same time, and L2 has the codes.
//
// S^T = K Q^T and O^T = V^T P by mma.m16n8k16: tokens (then head dims) are its rows, columns its columns. A column is a
// query head of the KV head and a query token. A warp's lane (g, t) = (lane / 4, lane % 4) holds, of each tile, rows g
// and g + 8 of K and four tokens of V, as words of 4 codes. Which head dims make a step of the product is free, so a
// lane's words of V, and of E4M3's K, are contiguous in memory.
//
// paged_decode_cuda.py compiles it with D (head size), COLUMN_TILES (columns of an item / 8), INT8, CAPPED and BLOCKED (0
// or 1), TILE (tokens that a warp takes at once), STAGES (tiles that it holds), BUFFERS (of the warps' sums), SPLIT and WARPS.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int ROWS = TILE / 16;                                 // m16 tiles
constexpr int KW = D / 16, VW = D / 32;                         // words a lane holds of a row of K, of V
constexpr int K_BYTES = 2 * ROWS * KW * 128, CODE_BYTES = TILE * D * 2;
constexpr int STAGE_BYTES = CODE_BYTES + (INT8 ? 4 * TILE : 0);
constexpr int SUM_ROW = D + 4;                                  // floats; shifts banks
constexpr int QUADS = D / 4;
constexpr int BLOCK_COLUMNS = COLUMN_TILES * 8;
constexpr bool PREFETCH_Q = COLUMN_TILES * KW <= 12;            // it must fit in registers
constexpr bool NEXT_HEAD_TOO = COLUMN_TILES == 1 && !INT8;      // L2 reads 256 bytes: faster where memory alone bounds
#define NONE __int_as_float(0xff800000)                         // minus infinity, a masked score
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;                                // a maximum of nothing
constexpr float Q_LIMIT = 127 * 256;                            // INT8: q's high byte is at most 127
constexpr float P_EXPONENT = 15.f;                              // P is at most 2^15, so that small ones are normal in FP16

struct Parameters {
  const u16 *q; i64 q_stride;                                   // BF16, over INT8 FP16 [sequences * queries, query heads, D]
  const unsigned char *k, *v; i64 slot_stride;                  // codes [slots, KV heads, D]
  const float *k_scale, *v_scale;                               // E4M3: [KV heads]
  const u32 *token_scales; i64 token_scales_stride;             // INT8: [KV heads, slots], BF16 of K (low) and V
  const int *pages; i64 pages_stride; int page_log2;            // [sequences, pages]
  const int4 *work; const int *first;                           // what plan writes
  float *split_sums; float2 *split_stats;                       // [splits, KV heads, columns, D]; maximum and sum of P
  u16 *out;                                                     // BF16, contiguous, of q's shape
  int sequences, heads, group, queries, window;                 // tokens before its own that a query sees
  float scale_log2;                                             // softmax scale / ln 2; CAPPED: times 2 / cap
  float cap_log2;                                               // CAPPED: cap / ln 2
  const void *sinks; int sink_bytes;                            // null, or [query heads] in BF16 (2) or FP32 (4)
};
#define PARAMETERS                                                                                                     \
  const u16 *q, i64 q_stride, const unsigned char *k, const unsigned char *v, i64 slot_stride, const float *k_scale,   \
      const float *v_scale, const u32 *token_scales, i64 token_scales_stride, const int *pages, i64 pages_stride,      \
      int page_log2, const int4 *work, const int *first, float *split_sums, float2 *split_stats, u16 *out,             \
      int sequences, int heads, int group, int queries, int window, float scale_log2, float cap_log2,             \
      const void *sinks, int sink_bytes
#define GIVEN                                                                                                          \
  {q, q_stride, k, v, slot_stride, k_scale, v_scale, token_scales, token_scales_stride, pages, pages_stride,           \
   page_log2, work, first, split_sums, split_stats, out, sequences, heads, group, queries, window, scale_log2, cap_log2, \
   sinks, sink_bytes}

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// Codes are read once a layer, so L2 may drop them first. Without `on` a place becomes 0.
__device__ __forceinline__ u64 read_once() { u64 r; asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r)); return r; }
__device__ __forceinline__ void copy_16(u32 to, const void *from, bool on, u64 policy) {
  const int size = on ? 16 : 0;
  if constexpr (NEXT_HEAD_TOO) asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(size), "l"(policy));
  else asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(size), "l"(policy));
}
__device__ __forceinline__ void copy_4(u32 to, const void *from, bool on) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(on ? 4 : 0));
}
__device__ __forceinline__ u32 permuted(u32 a, u32 b, u32 selector) {
  u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector)); return r;
}
__device__ __forceinline__ void e4m3_to_half(u32 x, u32 &low, u32 &high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(x));
}
// Bytes 0 and 2 of x, signed. 0x64 above a byte b is 1024 + b in FP16, so flipping the sign bit makes 1152 + the code.
__device__ __forceinline__ u32 int8_to_half(u32 x) {
  u32 y, r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(0x00ff00ffu), "r"(0x64806480u));  // (x & mask) ^ constant
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(y), "r"(0x64806480u));
  return r;
}
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 transposed(u32 x) { u32 r; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x)); return r; }
__device__ __forceinline__ u32 half2_of(float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
__device__ __forceinline__ u32 bf16x2_of(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float from_q(u32 bits) {
  if (!INT8) return from_bf16(bits);
  float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((u16)bits)); return r;
}
__device__ __forceinline__ float larger(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
// Byte `from` of each of four words.
__device__ __forceinline__ u32 bytes_of(const int (&x)[4], u32 from) {
  const u32 two = from | (from + 4) << 4;
  return permuted(permuted(x[0], x[1], two), permuted(x[2], x[3], two), 0x5410);
}
__device__ __forceinline__ float exp2_of(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float inverse_of(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float log2_of(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ void init_barrier(u64 *b, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count)); }
__device__ __forceinline__ void arrive(u64 *b) { asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(shared_address(b)) : "memory"); }
__device__ __forceinline__ void wait(u64 *b, int parity) {
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra done; bra again; done:}" ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// Where words lie. A lane's words of a row are pieces of 4, then 2, then 1; those of all lanes of a piece lie side by
// side, in memory and in a stage. W: words a lane holds; LANES: lanes that share a row, 4 for K and 8 for V.
template <int W> constexpr __device__ __forceinline__ int piece(int w) { return w < W / 4 * 4 ? 4 : w < W / 2 * 2 ? 2 : 1; }
template <int W, int LANES> constexpr __device__ __forceinline__ int dim_of(int w, int lane) {
  const int p = piece<W>(w), begin = p == 4 ? w / 4 * 4 : p == 2 ? W / 4 * 4 : W / 2 * 2;
  return begin * 4 * LANES + lane * p * 4 + (w - begin) * 4;
}
// V's lanes are permuted in a stage, so that neither copies nor reads meet in a bank.
__device__ __forceinline__ int v_slot(int g, int t) { return t * 8 + (g ^ (2 * t)); }
// INT8's K is read as matrices of 8 rows of 16 bytes. A row's pieces are swizzled, so that a matrix is in all banks.
constexpr int SWIZZLES = KW % 8 == 0 ? 8 : KW % 4 == 0 ? 4 : 2;
__device__ __forceinline__ int swizzle_of(int row) { return row / (8 / SWIZZLES) % SWIZZLES; }
// Four matrices, whose rows begin at the lanes' addresses: a lane gets a word of each.
__device__ __forceinline__ void read_matrices(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}
// The place in a stage of the 16 bytes of a row of K, or V, that begin at `byte`. Those of a row are near each other: where
// they were not, reading memory took a fifth more time.
__device__ __forceinline__ int k_place(int row, int byte) {
  if (INT8) return row * D + (byte / 16 ^ swizzle_of(row)) * 16;
  constexpr int PIECES_OF_4 = KW / 4 * 64, REST = KW % 4 * 4;
  const int g = row % 8, at = byte < PIECES_OF_4 ? byte / 64 * 512 + g * 64 + byte % 64 : PIECES_OF_4 * 8 + g * 4 * REST + byte - PIECES_OF_4;
  return row / 8 * KW * 128 + at;
}
__device__ __forceinline__ int v_place(int row, int byte) {
  constexpr int END_4 = VW / 4 * 128, END_2 = END_4 + (VW % 4 >= 2 ? 64 : 0);
  const int y = row % 16, t = y % 8 / 2, r = row / 16 * 4 + y / 8 * 2 + y % 2;  // lane (g, t) reads tokens 2t, 2t+1, 2t+8, 2t+9
  const int at = byte < END_4 ? byte / 128 * 512 + v_slot(byte % 128 / 16, t) * 16
               : byte < END_2 ? END_4 * 4 + v_slot((byte - END_4) / 8, t) * 8
                              : END_2 * 4 + (t * 8 + (byte - END_2) / 4) * 4;
  return r * VW * 128 + at;
}
template <int W, int w = 0> __device__ __forceinline__ void read_words(u32 (&x)[W], const unsigned char *from, int slot, int slot_of_1) {
  if constexpr (w < W) {
    constexpr int P = piece<W>(w);
    const unsigned char *at = from + w * 128 + (P == 1 ? slot_of_1 : slot) * 4 * P;
    if constexpr (P == 4) { const uint4 y = *(const uint4 *)at; x[w] = y.x; x[w + 1] = y.y; x[w + 2] = y.z; x[w + 3] = y.w; }
    else if constexpr (P == 2) { const uint2 y = *(const uint2 *)at; x[w] = y.x; x[w + 1] = y.y; }
    else x[w] = *(const u32 *)at;
    read_words<W, w + P>(x, from, slot, slot_of_1);
  }
}

// Outputs of four head dims, as sums under a maximum of log2 scores.
struct Sum {
  float top = LOWEST, p = 0; float4 o = make_float4(0, 0, 0, 0);
  __device__ __forceinline__ void add(float2 stats, float4 x) {
    const float f = exp2_of(stats.x - top);
    p = fmaf(stats.y, f, p); o.x = fmaf(x.x, f, o.x); o.y = fmaf(x.y, f, o.y); o.z = fmaf(x.z, f, o.z); o.w = fmaf(x.w, f, o.w);
  }
  __device__ __forceinline__ void write(const Parameters &a, int sequence, int head, int column, int dim, float highest) const {
    const int query_head = head * a.group + column % a.group;
    float total = p;
    if (a.sinks) {  // as a token without a V
      const float sink = a.sink_bytes == 2 ? from_bf16(__ldg((const u16 *)a.sinks + query_head)) : __ldg((const float *)a.sinks + query_head);
      total += exp2_of(fmaf(sink, LOG2_E, P_EXPONENT - highest));
    }
    const float inverse = (INT8 ? 1.f : __ldg(a.v_scale + head)) / total;
    const i64 row = (i64)(sequence * a.queries + column / a.group) * a.heads * a.group + query_head;
    *(uint2 *)(a.out + row * D + dim) = make_uint2(bf16x2_of(o.x * inverse, o.y * inverse), bf16x2_of(o.z * inverse, o.w * inverse));
  }
};

// Items of the same codes, and the columns of the largest one.
__device__ __forceinline__ int blocks_of(int columns) { return BLOCKED ? (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS : 1; }
__device__ __forceinline__ int width_of(int columns) { return BLOCKED ? min(columns, BLOCK_COLUMNS) : columns; }

// Merges the warps' sums of an item. Whether a sequence has more splits is known, so what they write goes to merge_splits:
// a fence here would wait for the copies that run ahead.
__device__ __forceinline__ void merge_warps(const Parameters &a, int item, int4 found, int columns, const float *sums) {
  const float2 *stats = (const float2 *)(sums + WARPS * width_of(columns) * SUM_ROW);
  const int blocks = blocks_of(columns), width = width_of(columns), head = item / blocks % a.heads, begin = item % blocks * BLOCK_COLUMNS;
  const i64 row = ((i64)(__ldg(a.first + found.x) + found.y) * a.heads + head) * columns + begin;
  for (int at = threadIdx.x; at < min(width, columns - begin) * QUADS; at += WARPS * 32) {
    const int column = at / QUADS, dim = at % QUADS * 4;
    Sum s;
#pragma unroll
    for (int w = 0; w < WARPS; w++) s.top = fmaxf(s.top, stats[w * width + column].x);
#pragma unroll
    for (int w = 0; w < WARPS; w++) s.add(stats[w * width + column], *(const float4 *)(sums + (w * width + column) * SUM_ROW + dim));
    if (found.w == 1) s.write(a, found.x, head, begin + column, dim, s.top);
    else { *(float4 *)(a.split_sums + (row + column) * D + dim) = s.o; if (dim == 0) a.split_stats[row + column] = make_float2(s.top, s.p); }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) decode(PARAMETERS) {
  const Parameters a = GIVEN;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ u64 full[BUFFERS], empty[BUFFERS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int columns = group * queries, blocks = blocks_of(columns), width = width_of(columns);
  const int items = first[sequences] * heads * blocks, split_tokens = first[sequences + 1];
  float *buffers = (float *)(memory + WARPS * STAGES * STAGE_BYTES);  // each: sums of warps and columns, then their statistics
  const int buffer = WARPS * width * (SUM_ROW + 2);
  if (threadIdx.x == 0) {
    for (int i = 0; i < BUFFERS; i++) { init_barrier(&full[i], WARPS); init_barrier(&empty[i], WARPS); }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");  // merge_splits starts, and waits

  // The copies run ahead: the tile that is copied next, with the slot of each lane's token.
  unsigned char *stages = memory + warp * STAGES * STAGE_BYTES;
  const u64 policy = read_once();
  const auto work_of = [&](int item) { return item < items ? __ldg(work + item / blocks / heads) : make_int4(0, 0, 0, 0); };
  const auto item_after = [&](int item) { return item + 2 * (int)(gridDim.x - item % gridDim.x) - 1; };
  const auto item_before = [&](int item) { return item - 2 * (int)(item % gridDim.x) - 1; };
  int copied = blockIdx.x, copied_token = 0, copied_end = 0, slot = 0, into = 0;
  int4 next_work = work_of(copied);
  const int *row_of_pages = pages;
  const auto find_slot = [&] {
    const int token = copied_token + lane;
    slot = lane < TILE && token < copied_end ? __ldg(row_of_pages + (token >> page_log2)) << page_log2 | (token & ((1 << page_log2) - 1)) : 0;
  };
  const auto begin_of = [&](int4 found) {  // the warp's first tile of an item that a query sees
    const int begin = found.y * split_tokens + warp * TILE, unseen = found.z - queries - window - begin;
    return begin + max(unseen, 0) / (WARPS * TILE) * (WARPS * TILE);
  };
  const auto end_of = [&](int4 found) { return min(found.z, (found.y + 1) * split_tokens); };
  const auto open_item = [&] {  // the next one that has a tile for this warp
    for (; copied < items; copied = item_after(copied)) {
      const int4 found = next_work;
      next_work = work_of(item_after(copied));
      copied_token = begin_of(found); copied_end = end_of(found);
      row_of_pages = pages + found.x * pages_stride;
      if (copied_token < copied_end) { find_slot(); return; }
    }
  };
  const auto copy_tile = [&] {
    if (copied < items) {
      const int head = copied / blocks % heads, left = copied_end - copied_token;
      const u32 to = shared_address(stages + into * STAGE_BYTES);
      constexpr int CHUNKS = D / 16;
#pragma unroll
      for (int i = 0; i < TILE * CHUNKS / 32; i++) {  // lanes side by side copy a row: L2 wants whole lines
        const int at = i * 32 + lane, row = at / CHUNKS, byte = at % CHUNKS * 16;
        const i64 from = __shfl_sync(~0u, slot, row) * slot_stride + head * D + byte;
        copy_16(to + k_place(row, byte), k + from, row < left, policy);
        copy_16(to + K_BYTES + v_place(row, byte), v + from, row < left, policy);
      }
      if (INT8 && lane < TILE) copy_4(to + CODE_BYTES + lane * 4, token_scales + head * token_scales_stride + slot, lane < left);
      copied_token += WARPS * TILE;
      if (copied_token < copied_end) find_slot(); else { copied = item_after(copied); open_item(); }
    }
    asm volatile("cp.async.commit_group;");
    into = into + 1 == STAGES ? 0 : into + 1;
  };
  open_item();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) copy_tile();

  // Lane (g, t) has column 8 c + g of q, in the head dims of K's lane t.
  uint2 raw_q[COLUMN_TILES][KW];
  const auto read_q = [&](int item, int4 found) {
    const int begin = item % blocks * BLOCK_COLUMNS;
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++) {
      const int column = begin + c * 8 + g; const bool on = column < columns && item < items;
      const u16 *row = q + (i64)(found.x * queries + column / group) * q_stride + (item / blocks % heads * group + column % group) * D;
#pragma unroll
      for (int w = 0; w < KW; w++) raw_q[c][w] = on ? __ldg((const uint2 *)(row + (INT8 ? w * 16 + t * 4 : dim_of<KW, 4>(w, t)))) : make_uint2(0, 0);
    }
  };
  const auto merge = [&](int item, int turn) {
    const int b = turn % BUFFERS;
    wait(&full[b], turn / BUFFERS & 1);
    merge_warps(a, item, work_of(item), columns, buffers + b * buffer);
    __syncwarp();
    if (lane == 0) arrive(&empty[b]);
  };
  const int matrix_swizzle = lane / 16 ^ swizzle_of(lane % 16);
  int stage = 0, turn = 0, item = blockIdx.x;
  int4 found = work_of(blockIdx.x), ahead;
  if (PREFETCH_Q) read_q(blockIdx.x, found);
  for (int next; item < items; item = next, turn++, found = ahead) {
    next = item_after(item);
    ahead = work_of(next);
    if (!PREFETCH_Q) read_q(item, found);
    const int end = end_of(found), seen_by_all = found.z - queries + 1, begin = item % blocks * BLOCK_COLUMNS;
    // q is scaled by a power of two to about 64, so that all of it is normal in FP16; over INT8 to integers of 16 bits.
    u32 qb[COLUMN_TILES][KW][2]; float q_scale[COLUMN_TILES][2]; int limit[COLUMN_TILES][2];
    const float scale = scale_log2 * (INT8 ? 1.f : __ldg(k_scale + item / blocks % heads));
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++) {
      float largest = 0;
#pragma unroll
      for (int w = 0; w < KW; w++) {
        const uint2 x = raw_q[c][w];
        largest = larger(larger(largest, larger(fabsf(from_q(x.x & 0xffff)), fabsf(from_q(x.x >> 16)))), larger(fabsf(from_q(x.y & 0xffff)), fabsf(from_q(x.y >> 16))));
      }
      largest = larger(largest, __shfl_xor_sync(~0u, largest, 1)); largest = larger(largest, __shfl_xor_sync(~0u, largest, 2));
      const int exponent = min(max((int)(__float_as_uint(largest) >> 23), 40), 214);
      const float factor = INT8 ? (largest > 0 ? Q_LIMIT / largest : 0) : __uint_as_float((u32)(260 - exponent) << 23);
      const float inverse = INT8 ? largest / Q_LIMIT : __uint_as_float((u32)(exponent - 6) << 23);  // of a NaN a NaN
#pragma unroll
      for (int w = 0; w < KW; w++) {
        const uint2 x = raw_q[c][w];
        const float y[4] = {from_q(x.x & 0xffff) * factor, from_q(x.x >> 16) * factor, from_q(x.y & 0xffff) * factor, from_q(x.y >> 16) * factor};
        if (INT8) {
          int low[4], high[4];  // bytes 0 and 1 of these, both signed
#pragma unroll
          for (int i = 0; i < 4; i++) { low[i] = __float2int_rn(y[i]); high[i] = low[i] + 128; }
          qb[c][w][0] = bytes_of(high, 1); qb[c][w][1] = bytes_of(low, 0);
        } else { qb[c][w][0] = half2_of(y[0], y[1]); qb[c][w][1] = half2_of(y[2], y[3]); }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        q_scale[c][i] = scale * __shfl_sync(~0u, inverse, (2 * t + i) * 4);
        limit[c][i] = seen_by_all + (begin + c * 8 + 2 * t + i) / group;  // a query token sees those before it
      }
    }
    if (PREFETCH_Q) read_q(next, ahead);
    float o[COLUMN_TILES][VW * 2][4] = {}, top[COLUMN_TILES][2], sum[COLUMN_TILES][2] = {};
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++) top[c][0] = top[c][1] = LOWEST;
    for (int token = begin_of(found); token < end; token += WARPS * TILE) {
      copy_tile();
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
      __syncwarp();
      const unsigned char *from = stages + stage * STAGE_BYTES;
      const u32 matrix_row = shared_address(from) + lane % 16 * D;
      float s[ROWS][COLUMN_TILES][4] = {};  // tokens g and g + 8, columns 2 t and 2 t + 1
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        if constexpr (INT8) {
          int high[COLUMN_TILES][4] = {}, low[COLUMN_TILES][4] = {};
#pragma unroll
          for (int w = 0; w < KW; w += 2) {
            u32 x[4];  // words w and w + 1 of tokens g and g + 8
            read_matrices(x, matrix_row + r * 16 * D + (matrix_swizzle ^ w) * 16);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++) { multiply(high[c], x, qb[c][w][0], qb[c][w + 1][0]); multiply(low[c], x, qb[c][w][1], qb[c][w + 1][1]); }
          }
#pragma unroll
          for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[r][c][i] = (float)(high[c][i] * 256 + low[c][i]);
        } else {
          u32 x[KW], y[KW];
          read_words<KW>(x, from + 2 * r * KW * 128, lane, lane); read_words<KW>(y, from + (2 * r + 1) * KW * 128, lane, lane);
#pragma unroll
          for (int w = 0; w < KW; w++) {
            u32 a0, a1, a2, a3;
            e4m3_to_half(x[w], a0, a2); e4m3_to_half(y[w], a1, a3);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++) multiply(s[r][c], a0, a1, a2, a3, qb[c][w][0], qb[c][w][1]);
          }
        }
      float k_of[2 * ROWS], v_log2[2 * ROWS], v_inverse[2 * ROWS];  // INT8: scales of the lane's tokens
      if (INT8) {
#pragma unroll
        for (int r = 0; r < 2 * ROWS; r++) {
          const u32 x = *(const u32 *)(from + CODE_BYTES + (g + 8 * r) * 4);
          const float v_of = x >> 16 ? from_bf16(x >> 16) : 1.f;
          k_of[r] = from_bf16(x & 0xffff); v_log2[r] = log2_of(v_of); v_inverse[r] = inverse_of(v_of);
        }
      }
      const bool all_seen = token + TILE <= min(end, seen_by_all) && token >= found.z - 1 - window;
      u32 pb[COLUMN_TILES][ROWS][2];
#pragma unroll
      for (int c = 0; c < COLUMN_TILES; c++) {
        float highest[2] = {top[c][0], top[c][1]};
#pragma unroll
        for (int r = 0; r < 2 * ROWS; r++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float &x = s[r / 2][c][r % 2 * 2 + i];
            x *= q_scale[c][i];
            if (CAPPED) {  // tanh(y) = 1 - 2 / (1 + exp(2 y)); tanh.approx would be off by 0.02 at a cap of 50
              if (INT8) x *= k_of[r];
              x = fmaf(-2.f * cap_log2, inverse_of(1.f + exp2_of(x)), cap_log2);
              if (INT8) x += v_log2[r];
            } else if (INT8) x = fmaf(x, k_of[r], v_log2[r]);  // P carries V's scale
            const int at = token + g + 8 * r;
            if (!all_seen && (at >= min(end, limit[c][i]) || at < limit[c][i] - 1 - window)) x = NONE;
            highest[i] = fmaxf(highest[i], x);
          }
        bool has_moved = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int lanes = 4; lanes < 32; lanes *= 2) highest[i] = fmaxf(highest[i], __shfl_xor_sync(~0u, highest[i], lanes));
          has_moved |= highest[i] != top[c][i];
        }
        if (__any_sync(~0u, has_moved)) {  // by 1 where a column's has not: other columns change no bit
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const float f = exp2_of(top[c][i] - highest[i]);
            top[c][i] = highest[i]; sum[c][i] *= f;
#pragma unroll
            for (int x = 0; x < VW * 2; x++) { o[c][x][i] *= f; o[c][x][2 + i] *= f; }
          }
        }
#pragma unroll
        for (int r = 0; r < 2 * ROWS; r++) {
          float p[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            p[i] = exp2_of(s[r / 2][c][r % 2 * 2 + i] - top[c][i] + P_EXPONENT);
            sum[c][i] = INT8 ? fmaf(p[i], v_inverse[r], sum[c][i]) : sum[c][i] + p[i];
          }
          pb[c][r / 2][r % 2] = transposed(half2_of(p[0], p[1]));
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        u32 x[4][VW];  // tokens 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
        for (int y = 0; y < 4; y++) read_words<VW>(x[y], from + K_BYTES + (r * 4 + y) * VW * 128, v_slot(g, t), t * 8 + g);
#pragma unroll
        for (int w = 0; w < VW; w++) {
          u32 m[2][4];  // rows are head dims 4 w and 4 w + 1, then 4 w + 2 and 4 w + 3, of the lane
#pragma unroll
          for (int y = 0; y < 2; y++) {
            const u32 first_token = x[2 * y][w], second_token = x[2 * y + 1][w];
            if (INT8) {
#pragma unroll
              for (int b = 0; b < 4; b++) m[b / 2][2 * y + b % 2] = int8_to_half(permuted(first_token, second_token, 0x0400 + 0x0101 * b));
            } else {
              e4m3_to_half(permuted(first_token, second_token, 0x5140), m[0][2 * y], m[0][2 * y + 1]);
              e4m3_to_half(permuted(first_token, second_token, 0x7362), m[1][2 * y], m[1][2 * y + 1]);
            }
          }
#pragma unroll
          for (int c = 0; c < COLUMN_TILES; c++) {
            multiply(o[c][2 * w], m[0][0], m[0][1], m[0][2], m[0][3], pb[c][r][0], pb[c][r][1]);
            multiply(o[c][2 * w + 1], m[1][0], m[1][1], m[1][2], m[1][3], pb[c][r][0], pb[c][r][1]);
          }
        }
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      __syncwarp();  // all have read what the next copy overwrites
    }
    float *sums = buffers + turn % BUFFERS * buffer; float2 *stats = (float2 *)(sums + WARPS * width * SUM_ROW);
    wait(&empty[turn % BUFFERS], turn / BUFFERS & 1 ^ 1);
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float total = sum[c][i];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
        const int column = c * 8 + 2 * t + i, row = warp * width + column;
        if (column >= min(width, columns - begin)) continue;
        if (g == 0) stats[row] = make_float2(top[c][i], total);
#pragma unroll
        for (int w = 0; w < VW; w++)
          *(float4 *)(sums + row * SUM_ROW + dim_of<VW, 8>(w, g)) = make_float4(o[c][2 * w][i], o[c][2 * w][2 + i], o[c][2 * w + 1][i], o[c][2 * w + 1][2 + i]);
      }
    __syncwarp();
    if (lane == 0) arrive(&full[turn % BUFFERS]);
    if (BUFFERS == 1) merge(item, turn);
    else if (turn) merge(item_before(item), turn - 1);  // all warps have ended it long ago
  }
  if (BUFFERS == 2 && turn) merge(item_before(item), turn - 1);
}

constexpr int MERGE_WARPS = 4;
constexpr int EACH = (QUADS + 31) / 32;                         // quads of a lane
constexpr int WARP_SPLITS = 8 / EACH;                           // up to so many of a sequence, a warp has all at once
// Merges the splits of sequences that have several, for each KV head and column: a warp does where there are few, and a
// block, whose warps take splits in turn, where there are more. How many there are depends on the sequence alone.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32, 8) merge_splits(PARAMETERS) {
  const Parameters a = GIVEN;
  __shared__ float4 sums[MERGE_WARPS][QUADS]; __shared__ float totals[MERGE_WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = group * queries, step = heads * columns;
  const auto wait_for_decode = [] { asm volatile("griddepcontrol.wait;" ::: "memory"); };
  const auto splits_of = [&](int at) { return first[at / step + 1] - first[at / step]; };
  const auto row_of = [&](int at, int split) { return (i64)(first[at / step] + split) * step + at % step; };
  const auto sum_of = [&](int at, int split, int quad) { return *(const float4 *)(split_sums + row_of(at, split) * D + quad * 4); };
  const auto write = [&](const Sum &s, int at, int quad, float top) { s.write(a, at / step, at % step / columns, at % columns, quad * 4, top); };
  const auto highest = [](float x) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
  };
  for (int at = blockIdx.x * MERGE_WARPS + warp; at < sequences * step; at += gridDim.x * MERGE_WARPS) {
    const int splits = splits_of(at);
    if (splits <= 1 || splits > WARP_SPLITS) continue;
    wait_for_decode();  // plan ended before it began
    const float2 mine = lane < splits ? split_stats[row_of(at, lane)] : make_float2(LOWEST, 0);
    float4 x[EACH][WARP_SPLITS];
#pragma unroll
    for (int i = 0; i < WARP_SPLITS; i++)
#pragma unroll
      for (int e = 0; e < EACH; e++)
        if (i < splits && lane + 32 * e < QUADS) x[e][i] = sum_of(at, i, lane + 32 * e);
    Sum s[EACH];
    const float top = highest(mine.x);
#pragma unroll
    for (int e = 0; e < EACH; e++) s[e].top = top;
#pragma unroll
    for (int i = 0; i < WARP_SPLITS; i++) {
      const float2 stats = make_float2(__shfl_sync(~0u, mine.x, i), __shfl_sync(~0u, mine.y, i));
#pragma unroll
      for (int e = 0; e < EACH; e++)
        if (i < splits) s[e].add(stats, x[e][i]);
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (lane + 32 * e < QUADS) write(s[e], at, lane + 32 * e, top);
  }
  for (int at = blockIdx.x; at < sequences * step; at += gridDim.x) {
    const int splits = splits_of(at);
    if (splits <= WARP_SPLITS) continue;
    wait_for_decode();
    Sum s[EACH];
    float top = LOWEST;
    for (int x = lane; x < splits; x += 32) top = fmaxf(top, split_stats[row_of(at, x)].x);
    top = highest(top);
#pragma unroll
    for (int e = 0; e < EACH; e++) s[e].top = top;
#pragma unroll 16
    for (int x = warp; x < splits; x += MERGE_WARPS) {
      const float2 stats = split_stats[row_of(at, x)];
#pragma unroll
      for (int e = 0; e < EACH; e++)
        if (lane + 32 * e < QUADS) s[e].add(stats, sum_of(at, x, lane + 32 * e));
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (lane + 32 * e < QUADS) sums[warp][lane + 32 * e] = s[e].o;
    if (lane == 0) totals[warp] = s[0].p;
    __syncthreads();
    if (threadIdx.x < QUADS) {
      Sum all; all.top = 0;
#pragma unroll
      for (int w = 0; w < MERGE_WARPS; w++) all.add(make_float2(0, totals[w]), sums[w][threadIdx.x]);
      write(all, at, threadIdx.x, top);
    }
    __syncthreads();
  }
  if (blockIdx.x == 0) wait_for_decode();  // what comes next waits for this kernel alone
}

// The work of a step: work is (sequence, split, length, splits) of each split, the longest first, since blocks take equal
// numbers; first is the index of each sequence's first split in split_sums, then their number, then the tokens of a
// split: SPLIT, or more where `capacity` splits would not do, as when many sequences share a prefix. One block of 1024.
constexpr int SIZES = 32;  // of splits: 0 is whole
extern "C" __global__ void __launch_bounds__(1024) plan(const int *lengths, int sequences, int capacity, int4 *work, int *first) {
  __shared__ int sums[32], next[SIZES];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int tokens = SPLIT;
  for (;; tokens *= 2) {
    int count = 0;
    for (int at = threadIdx.x; at < sequences; at += 1024) count += (lengths[at] + tokens - 1) / tokens;
    count = __reduce_add_sync(~0u, count);
    if (lane == 0) sums[warp] = count;
    __syncthreads();
    const int all = __reduce_add_sync(~0u, sums[lane]);
    __syncthreads();
    if (all <= capacity) break;
  }
  const auto size_of = [&](int rest) { return SIZES - 1 - rest / (tokens / (SIZES - 1) + 1); };  // 1 to SIZES - 1
  if (threadIdx.x < SIZES) next[threadIdx.x] = 0;
  __syncthreads();
  for (int at = threadIdx.x; at < sequences; at += 1024) {
    const int whole = lengths[at] / tokens, rest = lengths[at] % tokens;
    if (whole) atomicAdd(&next[0], whole);
    if (rest) atomicAdd(&next[size_of(rest)], 1);
  }
  __syncthreads();
  if (warp == 0) {
    const int mine = next[lane];
    int end = mine;
    for (int d = 1; d < 32; d *= 2) { const int y = __shfl_up_sync(~0u, end, d); if (lane >= d) end += y; }
    next[lane] = end - mine;
  }
  int base = 0;
  for (int begin = 0; begin < sequences; begin += 1024) {
    const int at = begin + threadIdx.x, length = at < sequences ? lengths[at] : 0, splits = (length + tokens - 1) / tokens;
    int end = splits;
    for (int d = 1; d < 32; d *= 2) { const int y = __shfl_up_sync(~0u, end, d); if (lane >= d) end += y; }
    if (lane == 31) sums[warp] = end;
    __syncthreads();
    if (warp == 0) {
      int x = sums[lane];
      for (int d = 1; d < 32; d *= 2) { const int y = __shfl_up_sync(~0u, x, d); if (lane >= d) x += y; }
      sums[lane] = x;
    }
    __syncthreads();
    end += base + (warp ? sums[warp - 1] : 0);
    if (at < sequences) first[at] = end - splits;
    const int whole = length / tokens, rest = length % tokens;
    if (whole) for (int s = 0, to = atomicAdd(&next[0], whole); s < whole; s++) work[to + s] = make_int4(at, s, length, splits);
    if (rest) work[atomicAdd(&next[size_of(rest)], 1)] = make_int4(at, whole, length, splits);
    base += sums[31];
    __syncthreads();
  }
  if (threadIdx.x == 0) { first[sequences] = base; first[sequences + 1] = tokens; }
}
