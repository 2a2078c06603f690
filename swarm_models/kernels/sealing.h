// AES-256-GCM for the links of a group, by the libcrypto that Python loads: nothing is linked when this is compiled.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

// The functions of libcrypto that are used, in the order of `_CRYPTO` in links.py
struct Crypto {
    void *(*new_context)();
    void (*free_context)(void *);
    const void *(*aes_256_gcm)();
    int (*init)(void *context, const void *cipher, void *engine, const uint8_t *key, const uint8_t *nonce, int encrypts);
    int (*update)(void *context, uint8_t *out, int *written, const uint8_t *in, int count);
    int (*final)(void *context, uint8_t *out, int *written);
    int (*control)(void *context, int what, int count, void *value);
};
inline Crypto crypto{};

constexpr int TAG = 16;  // bytes after each record
constexpr int GET_TAG = 0x10, SET_TAG = 0x11;  // EVP_CTRL_AEAD_GET_TAG and EVP_CTRL_AEAD_SET_TAG

// One direction of a link, with a key that nothing else uses: the number of a record is its nonce, so records cannot be
// left out, repeated or reordered.
class Sealing {
  public:
    Sealing() = default;
    Sealing(const Sealing &) = delete;
    ~Sealing() {
        if (context) crypto.free_context(context);
    }

    // key: 32 bytes. Returns whether it works.
    bool open(const uint8_t *key, bool encrypts) {
        this->encrypts = encrypts;
        if (!crypto.new_context || !(context = crypto.new_context())) return false;
        return crypto.init(context, crypto.aes_256_gcm(), nullptr, key, nullptr, encrypts) == 1;
    }
    bool is_open() const { return context; }

    // Encrypts ``count`` bytes -> out, which has room for ``TAG`` more
    bool seal(const char *in, int count, char *out) {
        return start() && cipher(in, count, out) && crypto.control(context, GET_TAG, TAG, out + count) == 1;
    }

    // Decrypts ``count`` bytes, which the tag follows -> out. Returns false if they are not what the other side has sealed.
    bool unseal(char *in, int count, char *out) {
        return start() && crypto.control(context, SET_TAG, TAG, in + count) == 1 && cipher(in, count, out);
    }

  private:
    bool start() {  // the next record
        uint8_t nonce[12] = {};
        memcpy(nonce + 4, &number, sizeof number);
        number++;
        return crypto.init(context, nullptr, nullptr, nullptr, nonce, encrypts) == 1;
    }
    bool cipher(const char *in, int count, char *out) {
        uint8_t rest[16];
        int written = 0, more = 0;
        return crypto.update(context, (uint8_t *)out, &written, (const uint8_t *)in, count) == 1 &&
               crypto.final(context, rest, &more) == 1 && written == count;
    }

    void *context = nullptr;
    bool encrypts = false;
    uint64_t number = 0;
};
