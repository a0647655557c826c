package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// progress prints one line when a step begins, one when it ends, and every so often what it is still waiting for.
type progress struct {
	mu    sync.Mutex
	out   io.Writer
	start time.Time
}

func newProgress(out io.Writer) *progress { return &progress{out: out, start: time.Now()} }

// Printf prints one line with the seconds since the run began.
func (p *progress) Printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.out, "%6.1fs  %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}

// every is how often a wait says what it is waiting for.
const every = 10 * time.Second

// hopeless is an error of waiting that no waiting mends.
type hopeless struct{ why string }

func (h hopeless) Error() string { return h.why }

// until polls waiting until it names nothing, for bound at most, or until there is no hope.
func (p *progress) until(ctx context.Context, what string, bound time.Duration,
	waiting func(context.Context) ([]string, error)) error {
	begin, said := time.Now(), time.Now()
	var last []string
	var lastErr error
	err := wait.PollUntilContextTimeout(ctx, 500*time.Millisecond, bound, true, func(ctx context.Context) (bool, error) {
		last, lastErr = waiting(ctx)
		if lastErr == nil && len(last) == 0 {
			return true, nil
		}
		if errors.As(lastErr, new(hopeless)) {
			return false, lastErr
		}
		if time.Since(said) >= every {
			said = time.Now()
			p.Printf("  waiting %.0f s for %s: %s", time.Since(begin).Seconds(), what, summary(last, lastErr))
		}
		return false, nil
	})
	if errors.As(err, new(hopeless)) {
		return err
	}
	if err != nil {
		return fmt.Errorf("waited %.0f s for %s: %s: %w", time.Since(begin).Seconds(), what, summary(last, lastErr), err)
	}
	return nil
}

// summary names the first few of what is waited for, in one line.
func summary(waiting []string, err error) string {
	if err != nil {
		return short(err.Error())
	}
	const few = 3
	var names []string
	for _, w := range waiting[:min(few, len(waiting))] {
		names = append(names, short(w))
	}
	if more := len(waiting) - few; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, "; ")
}

// short is the beginning of a message, in one line.
func short(message string) string {
	const length = 160
	message = strings.Join(strings.Fields(message), " ")
	if len(message) > length {
		message = strings.ToValidUTF8(message[:length], "") + " …"
	}
	return message
}
