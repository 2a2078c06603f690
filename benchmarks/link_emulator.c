/* Links between network namespaces with delay, rate and loss, for kernels that have no netem.
 *
 *   link_emulator NAMESPACE DEVICE NAMESPACE DEVICE ...      two ends, so four words, for each link
 *
 * Makes a TUN device at each end and carries packets from one to the other. A line on stdin sets one direction:
 *
 *   LINK END DELAY_US BITS_PER_S LOST_PER_MILLION QUEUE_US   packets that enter at that end; 0 bits/s: unlimited
 *
 * QUEUE_US is how long a packet may wait for those before it; what would wait longer is dropped, as is everything until
 * the first line of a direction. Prints "ready", then "set" after each line. Ends when stdin does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { PACKET_BYTES = 65536, PACKETS_AT_ONCE = 128, LINE_BYTES = 256 };
static const int64_t SECOND_NS = 1000000000;

struct packet {
    struct packet *behind;
    int64_t arrives_ns;
    size_t num_bytes;
    unsigned char bytes[];
};

struct direction {
    int from, to; /* TUN devices */
    int64_t delay_ns, queue_ns, bits_per_s;
    uint32_t lost_per_million;
    int64_t idle_from_ns; /* when the last packet will have left */
    struct packet *first, *last;
};

static struct direction *directions;
static int num_directions;
static uint64_t chance = 0x9e3779b97f4a7c15u;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

/* xorshift64 (Marsaglia, 2003): the same packets are lost in each run. */
static uint32_t one_of_a_million(void) {
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return (chance >> 16) % 1000000;
}

static int tun_in(const char *namespace, const char *device) {
    char path[512];
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int place = open(path, O_RDONLY | O_CLOEXEC);
    if (place < 0 || setns(place, CLONE_NEWNET)) fail(path);
    close(place);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tun < 0) fail("/dev/net/tun");
    struct ifreq wanted = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    snprintf(wanted.ifr_name, sizeof wanted.ifr_name, "%s", device);
    if (ioctl(tun, TUNSETIFF, &wanted)) fail(device);
    return tun;
}

static void take(struct direction *d) {
    static unsigned char buffer[PACKET_BYTES];
    for (int count = 0; count < PACKETS_AT_ONCE; count++) {
        ssize_t num_bytes = read(d->from, buffer, sizeof buffer);
        if (num_bytes <= 0) return;
        int64_t now = clock_ns(), leaves = d->idle_from_ns > now ? d->idle_from_ns : now;
        if (one_of_a_million() < d->lost_per_million || leaves - now > d->queue_ns) continue;
        if (d->bits_per_s) leaves += num_bytes * 8 * SECOND_NS / d->bits_per_s;
        d->idle_from_ns = leaves;
        struct packet *p = malloc(sizeof *p + num_bytes);
        if (!p) fail("malloc");
        p->behind = NULL;
        p->arrives_ns = leaves + d->delay_ns;
        p->num_bytes = num_bytes;
        memcpy(p->bytes, buffer, num_bytes);
        if (d->last) d->last->behind = p;
        else d->first = p;
        d->last = p;
    }
}

static void deliver(struct direction *d) {
    int64_t now = clock_ns();
    while (d->first && d->first->arrives_ns <= now) {
        struct packet *p = d->first;
        d->first = p->behind;
        if (!d->first) d->last = NULL;
        ssize_t written = write(d->to, p->bytes, p->num_bytes); /* a device that is down takes none */
        (void)written;
        free(p);
    }
}

static void set(const char *line) {
    long long link, end, delay_us, bits_per_s, lost, queue_us;
    int found = sscanf(line, "%lld %lld %lld %lld %lld %lld", &link, &end, &delay_us, &bits_per_s, &lost, &queue_us);
    if (found != 6 || link < 0 || 2 * link + 1 >= num_directions || end < 0 || end > 1) {
        fprintf(stderr, "no line: %s", line);
        exit(1);
    }
    struct direction *d = &directions[2 * link + end];
    d->delay_ns = delay_us * 1000;
    d->queue_ns = queue_us * 1000;
    d->bits_per_s = bits_per_s;
    d->lost_per_million = lost;
    puts("set");
    fflush(stdout);
}

/* Whole lines only; a line that is read in pieces is kept until its end has come. */
static void read_lines(void) {
    static char text[LINE_BYTES];
    static size_t length;
    ssize_t more = read(STDIN_FILENO, text + length, sizeof text - 1 - length);
    if (more <= 0) exit(0);
    length += more;
    text[length] = 0;
    char *end, *start = text;
    while ((end = strchr(start, '\n'))) {
        *end = 0;
        set(start);
        start = end + 1;
    }
    length -= start - text;
    memmove(text, start, length);
}

int main(int num_words, char **words) {
    int num_links = (num_words - 1) / 4;
    num_directions = 2 * num_links;
    directions = calloc(num_directions, sizeof *directions);
    struct pollfd *polled = calloc(num_directions + 1, sizeof *polled);
    if (!directions || !polled) fail("calloc");
    prctl(PR_SET_TIMERSLACK, 1000);
    prctl(PR_SET_PDEATHSIG, 15);
    for (int link = 0; link < num_links; link++) {
        char **ends = words + 1 + 4 * link;
        int tuns[] = {tun_in(ends[0], ends[1]), tun_in(ends[2], ends[3])};
        for (int end = 0; end < 2; end++) {
            directions[2 * link + end] =
                (struct direction){.from = tuns[end], .to = tuns[1 - end], .lost_per_million = 1000000};
            polled[2 * link + end] = (struct pollfd){.fd = tuns[end], .events = POLLIN};
        }
    }
    polled[num_directions] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t next = INT64_MAX, now;
        for (int i = 0; i < num_directions; i++)
            if (directions[i].first && directions[i].first->arrives_ns < next) next = directions[i].first->arrives_ns;
        now = clock_ns();
        int64_t wait = next > now ? next - now : 0;
        struct timespec timeout = {wait / SECOND_NS, wait % SECOND_NS};
        if (ppoll(polled, num_directions + 1, next == INT64_MAX ? NULL : &timeout, NULL) < 0 && errno != EINTR)
            fail("ppoll");
        if (polled[num_directions].revents) read_lines();
        for (int i = 0; i < num_directions; i++) {
            if (polled[i].revents & POLLIN) take(&directions[i]);
            deliver(&directions[i]);
        }
    }
}
