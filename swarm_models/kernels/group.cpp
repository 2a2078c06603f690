// Products whose weights are split by outputs over several processes, the members of a group. The leader sends the inputs to
// all followers, computes its own outputs meanwhile, and receives the others. Every output is one whole product, so the
// result is bit for bit that of the unsplit weight.
//
// A link is a connected stream socket. On one machine bytes go through shared memory, and the socket only tells that
// the other process has ended. Between machines they go through the socket, in records that are sealed with keys of the link.
// Whoever waits polls for a while, because a product takes less time than waking up a process.
//
// Needs a C++17 compiler and POSIX sockets; called from Python through the functions at the end of this file.
#if !defined(_WIN32)
#include "group.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "exported.h"
#include "platform.h"
#include "sealing.h"

namespace {

constexpr long STRIP = 64;  // outputs that are packed together, and that one member has
constexpr long WHOLE = 1 << 16;  // the sum of all members' shares of the strips
constexpr long RING = 1 << 20;  // bytes of shared memory in each direction
constexpr int RECORD = 1 << 16;  // most bytes that are sealed together
constexpr long MOST_FLOATS = 1L << 30;  // of one request's inputs
// Polling without a pause, and with short pauses; after that a member sleeps until it looks again
constexpr long SPIN_NS = 300'000, SHORT_PAUSES_NS = 100'000'000;
constexpr long LOOK_NS = 1'000'000;  // between two looks at the socket
constexpr auto SHORT_PAUSE = std::chrono::microseconds(100);
constexpr int SLEEP_MS = 1;

enum Outcome { DONE = 0, ENDED = -1, TOO_SLOW = -2, NO_MEMORY = -3, NOT_UNDERSTOOD = -4, NOT_GENUINE = -5 };
enum Wanted : int32_t { PRODUCT = 0, ECHO = -1 };  // numbers above 0 are requests that Python answers

struct Request {
    int32_t wanted, sequence, threads;
    int32_t rows, width, count;
    int32_t numbers[MOST_WEIGHTS];
};

struct Reply {
    int32_t sequence, outcome;
};

struct Ring {  // of one writer and one reader
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) char bytes[RING];
};

long now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

void pause_briefly() {
#if X86
    _mm_pause();
#elif ARM && defined(__GNUC__)
    __asm__ volatile("yield");
#endif
}

struct Link {
    const int socket;
    Ring *const out, *const in;  // null: bytes go through the socket
    long limit_ns;  // for the other side to send or take a byte
    Sealing sealing, unsealing;  // closed: bytes are sent as they are

    Link(int socket, Ring *out, Ring *in, long limit_ns) : socket(socket), out(out), in(in), limit_ns(limit_ns) {}

    int send(const void *from, long count) {
        if (!sealing.is_open()) return send_plain(from, count);
        for (long done = 0; done < count;) {
            const int part = (int)std::min<long>(count - done, RECORD);
            sealed.resize(sizeof part + RECORD + TAG);
            memcpy(sealed.data(), &part, sizeof part);
            if (!sealing.seal((const char *)from + done, part, sealed.data() + sizeof part)) return NOT_GENUINE;
            if (int failure = send_plain(sealed.data(), sizeof part + part + TAG)) return failure;
            done += part;
        }
        return DONE;
    }

    // may_be_idle: the other side may take any time until the first byte
    int receive(void *to, long count, bool may_be_idle = false) {
        if (!unsealing.is_open()) return receive_plain(to, count, may_be_idle);
        for (long done = 0; done < count;) {
            if (taken == there)
                if (int failure = receive_record(may_be_idle && done == 0)) return failure;
            const long part = std::min(count - done, there - taken);
            memcpy((char *)to + done, opened.data() + taken, part);
            taken += part, done += part;
        }
        return DONE;
    }

  private:
    std::vector<char> sealed, arrived, opened;
    long there = 0, taken = 0;  // bytes in ``opened``, and how many of them have been received

    int receive_record(bool may_be_idle) {
        int count;
        if (int failure = receive_plain(&count, sizeof count, may_be_idle)) return failure;
        if (count < 1 || count > RECORD) return NOT_GENUINE;
        arrived.resize(RECORD + TAG), opened.resize(RECORD);
        if (int failure = receive_plain(arrived.data(), count + TAG, false)) return failure;
        if (!unsealing.unseal(arrived.data(), count, opened.data())) return NOT_GENUINE;
        there = count, taken = 0;
        return DONE;
    }

    // Sends or receives some bytes at once, without waiting; 0 if none could go, or ENDED
    long send_some(const char *bytes, long count) {
        if (!out) return of_socket(::send(socket, bytes, count, FLAGS));
        const uint64_t at = out->written.load(std::memory_order_relaxed);
        const long room = RING - (long)(at - out->read.load(std::memory_order_acquire));
        count = std::min({count, room, RING - (long)(at % RING)});
        memcpy(out->bytes + at % RING, bytes, count);
        out->written.store(at + count, std::memory_order_release);
        return count;
    }
    long receive_some(char *bytes, long count) {
        if (!in) {
            const long received = ::recv(socket, bytes, count, FLAGS);
            return received == 0 ? ENDED : of_socket(received);
        }
        const uint64_t at = in->read.load(std::memory_order_relaxed);
        const long there = (long)(in->written.load(std::memory_order_acquire) - at);
        count = std::min({count, there, RING - (long)(at % RING)});
        memcpy(bytes, in->bytes + at % RING, count);
        in->read.store(at + count, std::memory_order_release);
        return count;
    }

    int send_plain(const void *from, long count) {
        return move(count, false, POLLOUT, [&](long done) { return send_some((const char *)from + done, count - done); });
    }
    int receive_plain(void *to, long count, bool may_be_idle) {
        return move(count, may_be_idle, POLLIN, [&](long done) { return receive_some((char *)to + done, count - done); });
    }

#if defined(MSG_NOSIGNAL)
    static constexpr int FLAGS = MSG_DONTWAIT | MSG_NOSIGNAL;
#else
    static constexpr int FLAGS = MSG_DONTWAIT;
#endif

    static long of_socket(long result) {
        return result >= 0 ? result : errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : ENDED;
    }

    template <class Some> int move(long count, bool may_be_idle, short event, const Some &some) {
        long done = 0, since = 0, looked = 0;
        for (int turn = 1; done < count; turn++) {
            const long moved = some(done);
            if (moved < 0) return ENDED;
            if (moved > 0) {
                done += moved;
                since = 0;
                continue;
            }
            pause_briefly();
            if (turn % 64) continue;
            const long now = now_ns();
            if (!since) since = looked = now;
            const bool is_idle = may_be_idle && done == 0;
            if (!is_idle && now - since > limit_ns) return TOO_SLOW;
            const long waited = now - since;
            if (waited > SHORT_PAUSES_NS || now - looked > LOOK_NS) {
                looked = now;
                if (is_alive(waited > SHORT_PAUSES_NS ? SLEEP_MS : 0, event)) continue;
                // It may have written its last bytes to shared memory after the last look, just before it closed its end
                const long last = event == POLLIN ? some(done) : 0;
                if (last <= 0) return ENDED;
                done += last, since = 0;
            } else if (waited > SPIN_NS) {
                std::this_thread::sleep_for(SHORT_PAUSE);
            } else {
                sched_yield();
            }
        }
        return DONE;
    }

    // Waits up to so long, and returns whether the other side has its end of the socket still open
    bool is_alive(int wait_ms, short event) const {
        pollfd waited{socket, short(in ? POLLIN : event), 0};
        if (poll(&waited, 1, wait_ms) <= 0) return true;
        return !(waited.revents & (POLLERR | POLLNVAL)) && !(in && waited.revents);  // nothing is sent beside shared memory
    }
};

// Fills ``firsts``, [members + 1], with the first output of each member, and with ``out``. Every member has whole strips, at
// least one, in proportion to its share; ``ends`` are the sums of the shares. If there are fewer strips than members, the
// first member has all outputs.
void deal(long out, const int32_t *ends, int members, long *firsts) {
    const long strips = (out + STRIP - 1) / STRIP;
    firsts[0] = 0, firsts[members] = out;
    for (int member = 1; member < members; member++) {
        const long wanted = (strips * ends[member - 1] + WHOLE / 2) / WHOLE;
        const long first = std::min(std::max(wanted, firsts[member - 1] / STRIP + 1), strips - (members - member));
        firsts[member] = strips < members ? out : first * STRIP;
    }
}

int multiply_own(const float *x, long rows, long in, int count, const uint8_t *const *packed, const float *const *scales,
                 float *const *ys, const long *outs, int isa, int threads) {
    return scales[0] ? swarm_matmul(x, rows, in, count, packed, scales, ys, outs, isa, threads)
                     : swarm_matmul4(x, rows, in, count, packed, ys, outs, isa, threads);
}

}  // namespace

struct Group {
    std::vector<Link *> followers;
    std::mutex mutex;
    int32_t sequence = 0;
    int failed = DONE;  // for good: after an error nobody knows what the bytes on a link mean
    std::vector<int32_t> ends;  // the sums of the members' shares
    std::vector<std::atomic<int64_t>> spent_ns;  // in products: of the leader's own outputs, and waiting for each follower
    std::vector<float> own;
    std::vector<long> firsts;  // of the product's weights: the first output of each member

    int multiply(const SharedProduct &product, int isa, int threads) {
        const int members = (int)followers.size() + 1;
        firsts.resize(product.count * (members + 1));
        for (int i = 0; i < product.count; i++) deal(product.outs[i], ends.data(), members, firsts_of(i));
        Request request{PRODUCT, ++sequence, threads, (int32_t)product.rows, (int32_t)product.in, product.count, {}};
        std::copy(product.numbers, product.numbers + product.count, request.numbers);
        for (Link *link : followers)
            if (int failure = link->send(&request, sizeof request)) return failure;
        for (Link *link : followers)
            if (int failure = link->send(product.x, product.rows * product.in * 4)) return failure;
        long since = now_ns();
        if (int failure = multiply_here(product, isa, threads)) return failure;
        since = spend(0, since);
        for (int member = 1; member < members; member++) {
            if (int failure = receive_from(*followers[member - 1], product, member)) return failure;
            since = spend(member, since);
        }
        return DONE;
    }

    long spend(int member, long since) {
        const long now = now_ns();
        spent_ns[member].fetch_add(now - since, std::memory_order_relaxed);
        return now;
    }

    long *firsts_of(int weight) { return firsts.data() + weight * (followers.size() + 2); }

    int multiply_here(const SharedProduct &product, int isa, int threads) {
        float *ys[MOST_WEIGHTS];
        long outs[MOST_WEIGHTS], total = 0;
        for (int i = 0; i < product.count; i++) total += outs[i] = firsts_of(i)[1];
        if (product.rows > 1) own.resize(product.rows * total);
        float *next = own.data();
        for (int i = 0; i < product.count; i++, next += product.rows * outs[i - 1])
            ys[i] = product.rows > 1 ? next : product.ys[i];
        if (multiply_own(product.x, product.rows, product.in, product.count, product.packed, product.scales, ys, outs, isa, threads))
            return NO_MEMORY;
        for (int i = 0; i < product.count && product.rows > 1; i++)
            for (long row = 0; row < product.rows; row++)
                memcpy(product.ys[i] + row * product.outs[i], ys[i] + row * outs[i], outs[i] * 4);
        return DONE;
    }

    int receive_from(Link &link, const SharedProduct &product, int member) {
        Reply reply;
        if (int failure = link.receive(&reply, sizeof reply)) return failure;
        if (reply.sequence != sequence || reply.outcome != DONE) return reply.outcome ? reply.outcome : NOT_UNDERSTOOD;
        for (int i = 0; i < product.count; i++) {
            const long out = product.outs[i], first = firsts_of(i)[member], last = firsts_of(i)[member + 1];
            for (long row = 0; row < product.rows; row++)
                if (int failure = link.receive(product.ys[i] + row * out + first, (last - first) * 4)) return failure;
        }
        return DONE;
    }
};

int multiply_in_group(Group &group, const SharedProduct &product, int isa, int threads) {
    const std::lock_guard<std::mutex> lock(group.mutex);
    if (group.failed) return group.failed;
    try {
        return group.failed = group.multiply(product, isa, threads);
    } catch (const std::bad_alloc &) {
        return group.failed = NO_MEMORY;
    }
}

// ------------------------------------------------------------ functions for Python

// A follower's outputs of one weight
struct OwnWeight {
    int64_t out, in;
    const uint8_t *packed;
    const float *scale;  // int4: null
};

EXPORT long swarm_ring_bytes() { return sizeof(Ring); }
EXPORT long swarm_request_bytes() { return sizeof(Request); }

// rings: two of them in shared memory, filled with zeros; null: bytes go through the socket. member: 0 or 1.
EXPORT Link *swarm_open_link(int socket, void *rings, int member, double limit_s) {
    Ring *both = (Ring *)rings;
    return new (std::nothrow) Link(socket, both ? both + member : nullptr, both ? both + 1 - member : nullptr, (long)(limit_s * 1e9));
}
EXPORT void swarm_use_crypto(const Crypto *functions) { crypto = *functions; }

// From now on, bytes are sealed. The keys have 32 bytes, and each is of one direction of this link. Returns 0 if it works.
EXPORT int swarm_seal_link(Link *link, const uint8_t *sending_key, const uint8_t *receiving_key) {
    return link->sealing.open(sending_key, true) && link->unsealing.open(receiving_key, false) ? DONE : NOT_GENUINE;
}
EXPORT void swarm_limit_link(Link *link, double limit_s) { link->limit_ns = (long)(limit_s * 1e9); }
EXPORT void swarm_close_link(Link *link) { delete link; }
EXPORT int swarm_link_send(Link *link, const void *bytes, long count) { return link->send(bytes, count); }
EXPORT int swarm_link_receive(Link *link, void *bytes, long count) { return link->receive(bytes, count); }

// ends: for each member, the leader first, the sum of its share and those of the members before it
EXPORT Group *swarm_open_group(Link *const *followers, int count, const int32_t *ends) {
    Group *group = new (std::nothrow) Group;
    if (!group) return nullptr;
    group->followers.assign(followers, followers + count);
    group->ends.assign(ends, ends + count + 1);
    group->spent_ns = std::vector<std::atomic<int64_t>>(count + 1);
    return group;
}
EXPORT void swarm_close_group(Group *group) { delete group; }

// Fills ``spent_ns``, [members], with the time in all products so far: of the leader's own outputs, and of waiting for each follower
EXPORT void swarm_group_times(const Group *group, int64_t *spent_ns) {
    for (const auto &each : group->spent_ns) *spent_ns++ = each.load(std::memory_order_relaxed);
}

EXPORT void swarm_deal_outputs(long out, const int32_t *ends, int members, long *firsts) { deal(out, ends, members, firsts); }

// Multiplies x by one weight of the group: y, [rows][out]
EXPORT int swarm_group_matmul(Group *group, int number, const float *x, long rows, long in, const uint8_t *packed,
                              const float *scale, float *y, long out, int isa, int threads) {
    const int32_t numbers[] = {number};
    return multiply_in_group(*group, {x, rows, in, 1, numbers, &packed, &scale, &y, &out}, isa, threads);
}

// Answers the leader's requests for products, until it wants something else: then returns 0, and the request for Python.
// own_threads: how many threads multiply; 0: as many as the leader has.
EXPORT int swarm_follow(Link *link, const OwnWeight *weights, long num_weights, Request *request, int isa, int own_threads) try {
    std::vector<float> x, y;
    for (;;) {
        if (int failure = link->receive(request, sizeof *request, true)) return failure;
        const long rows = request->rows, in = request->width;
        if (request->wanted == ECHO) {  // as many numbers as the leader sends
            if (rows < 1 || in < 1 || rows > MOST_FLOATS / in) return NOT_UNDERSTOOD;
            x.resize(rows * in);
            if (int failure = link->receive(x.data(), rows * in * 4)) return failure;
            if (int failure = link->send(x.data(), rows * in * 4)) return failure;
            continue;
        }
        if (request->wanted != PRODUCT) return DONE;
        const int count = request->count, threads = own_threads ? own_threads : request->threads;
        if (threads < 1 || rows < 1 || in < 1 || rows > MOST_FLOATS / in || count < 1 || count > MOST_WEIGHTS) return NOT_UNDERSTOOD;
        const uint8_t *packed[MOST_WEIGHTS];
        const float *scales[MOST_WEIGHTS];
        float *ys[MOST_WEIGHTS];
        long outs[MOST_WEIGHTS], total = 0;
        for (int i = 0; i < count; i++) {
            const int32_t number = request->numbers[i];
            if (number < 0 || number >= num_weights || weights[number].in != in) return NOT_UNDERSTOOD;
            if (!weights[number].scale != !weights[request->numbers[0]].scale) return NOT_UNDERSTOOD;
            packed[i] = weights[number].packed, scales[i] = weights[number].scale;
            total += outs[i] = weights[number].out;
        }
        if ((long)x.size() < rows * in) x.resize(rows * in);
        if ((long)y.size() < rows * total) y.resize(rows * total);
        float *next = y.data();
        for (int i = 0; i < count; i++, next += rows * outs[i - 1]) ys[i] = next;
        if (int failure = link->receive(x.data(), rows * in * 4)) return failure;
        const Reply reply{request->sequence,
                          multiply_own(x.data(), rows, in, count, packed, scales, ys, outs, isa, threads) ? NO_MEMORY : DONE};
        if (int failure = link->send(&reply, sizeof reply)) return failure;
        if (reply.outcome) return reply.outcome;
        if (int failure = link->send(y.data(), rows * total * 4)) return failure;
    }
} catch (const std::bad_alloc &) {
    return NO_MEMORY;
}
#else  // Windows has no such sockets: there are no groups
#include "group.h"
int multiply_in_group(Group &, const SharedProduct &, int, int) { return -1; }
#endif
